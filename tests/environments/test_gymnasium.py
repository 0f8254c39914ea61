"""Environments of gymnasium: observations as texts, the last action that an answer names."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.core.environments import AssistantMessage
from async_opd.core.errors import StageError
from async_opd.environments.kinds import Played, kind_of
from tests.world.environments import row, spec_of

pytest.importorskip("gymnasium", reason="needs the extra environments")
LAKE = {
    "id": "FrozenLake-v1",
    "kwargs": {"render_mode": "ansi", "is_slippery": False},
    "actions": ["left", "down", "right", "up"],
}
WAY = ["down", "down", "right", "right", "down", "right"]


def lake(**section: Any) -> Played:
    return kind_of(spec_of("gymnasium", **{**LAKE, **section}).config)()


def test_the_first_observation_follows_the_prompt_and_shows_the_player_in_brackets() -> None:
    opening = lake().reset(row(), 0)
    assert opening.history("Cross the lake.") == [
        {"role": "user", "content": "Cross the lake.\n\n[S]FFF\nFHFH\nFFFH\nHFFG"}
    ]
    assert opening.tools == ()


def test_an_episode_ends_with_the_environments_and_has_the_sum_of_its_rewards() -> None:
    made = lake()
    made.reset(row(), 0)
    *on_the_way, last = [made.step(AssistantMessage(f"I go {way}.")) for way in WAY]
    assert [outcome.done for outcome in (*on_the_way, last)] == [False] * 5 + [True]
    assert made.reward() == 1.0


@pytest.mark.parametrize("answer", ["Not left: RIGHT", "right", "up, or better\nright!"])
def test_the_last_name_in_an_answer_acts(answer: str) -> None:
    made = lake()
    made.reset(row(), 0)
    (message,) = made.step(AssistantMessage(answer)).messages
    assert message == {"role": "user", "content": "  (Right)\nS[F]FF\nFHFH\nFFFH\nHFFG"}


@pytest.mark.parametrize("answer", ["upright", "", "I do not know"])
def test_an_answer_without_an_action_gets_their_names_and_counts(answer: str) -> None:
    made = lake()
    made.reset(row(), 0)
    outcome = made.step(AssistantMessage(answer))
    assert outcome.messages[0]["content"] == "The actions are: left, down, right, up."
    assert (outcome.unknown, outcome.done) == (1, False)


def test_without_names_the_last_integer_acts_and_others_are_refused() -> None:
    made = lake(actions=[], kwargs={"is_slippery": False})
    made.reset(row(), 0)
    assert made.step(AssistantMessage("first 0, then 1")).messages[0]["content"] == "4"
    assert made.step(AssistantMessage("7")).unknown == 1


def test_a_turn_that_could_not_be_read_gets_the_reason_and_does_not_act() -> None:
    made = lake()
    made.reset(row(), 0)
    outcome = made.step(AssistantMessage("right", malformed=("it was cut off",)))
    assert (outcome.messages[0]["content"], outcome.unknown) == ("it was cut off", 0)


def test_the_same_seed_begins_the_same_episode() -> None:
    shown = []
    for seed in (3, 3, 4):
        made = lake(id="CartPole-v1", kwargs={}, actions=[])
        shown.append(made.reset(row(), seed).text)
    assert shown[0] == shown[1] != shown[2]


@pytest.mark.parametrize(
    ("section", "found"),
    [
        ({"id": "Nowhere-v0"}, "Nowhere"),
        ({"id": "Pendulum-v1", "kwargs": {}}, "a model's answer names one of a few"),
        ({"actions": ["left"]}, "has 1 names, FrozenLake-v1 4"),
    ],
)
def test_an_environment_that_no_answer_can_act_in_is_refused(
    section: dict[str, Any], found: str
) -> None:
    with pytest.raises(StageError, match=found):
        lake(**section)
