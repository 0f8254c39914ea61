"""Mixtures by weight, size and step are functions of the cursor: a resume goes on with them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError
from async_opd.core.row import Row
from async_opd.core.samples import DeadLetter, Prompt
from async_opd.data.mixture import Mixture, Phase, phases_of, with_steps
from async_opd.data.prompts import PromptStream
from tests.world.config import run_config


def config(*sources: dict[str, Any], **sections: Any) -> RunConfig:
    tree: dict[str, Any] = {
        "data": {"train": [{"path": "x.jsonl", **source} for source in sources]},
        "train": {"steps": 10, "batch_size": 8},
        "rollout": {"n": 2},
    }
    return run_config(**tree | {key: {**tree[key], **found} for key, found in sections.items()})


@st.composite
def phases(draw: st.DrawFn) -> list[Phase]:
    """Phases of a few sources, of which each has at least one."""
    count = draw(st.integers(1, 3))
    weight = st.sampled_from([0.0, 0.2, 1.0, 3.0])
    weights = st.lists(weight, min_size=count, max_size=count).filter(any)
    begins = sorted(draw(st.sets(st.integers(1, 40), max_size=3)))
    return [(begin, draw(weights)) for begin in (0, *begins)]


@given(phases(), st.integers(1, 80))
def test_in_no_phase_a_source_is_a_prompt_ahead_of_its_share(made: list[Phase], count: int) -> None:
    mixture = Mixture(made)
    sources = [mixture.advance()[0] for _ in range(count)]
    for (begin, weights), end in zip(made, [one[0] for one in made[1:]] + [count], strict=True):
        of_phase = sources[begin : min(end, count)]
        for source, weight in enumerate(weights):
            share = len(of_phase) * weight / sum(weights)
            assert abs(of_phase.count(source) - share) < 1 + 1e-9
            assert weight or source not in of_phase


def route(data_source: str) -> str:
    return data_source


def stream(made: list[Phase], cursor: int) -> PromptStream:
    count = len(made[0][1])
    rows = [[Row(f"{i}:{j}", str(i), "x", None, {}) for j in range(5)] for i in range(count)]
    return PromptStream(rows, Mixture(made), lambda _: [1], route, seed=3, cursor=cursor)


def uids(prompts: list[Prompt | DeadLetter]) -> list[str]:
    return [one.uid for one in prompts if isinstance(one, Prompt)]


@given(phases(), st.integers(0, 60), st.integers(1, 30))
def test_a_resumed_stream_goes_on_as_the_one_that_was_not_interrupted(
    made: list[Phase], before: int, after: int
) -> None:
    whole, resumed = stream(made, 0), stream(made, before)
    taken = uids(whole.next(before + after))
    assert taken[before:] == uids(resumed.next(after))
    assert whole.cursor == resumed.cursor
    assert len(set(taken)) == before + after  # no prompt comes twice


@given(phases(), st.integers(0, 60))
def test_a_prompt_that_could_not_be_read_comes_again(made: list[Phase], before: int) -> None:
    mixture = Mixture(made)
    for _ in range(before):
        mixture.advance()
    expected = mixture.advance()
    mixture.back(expected[0])
    assert mixture.advance() == expected


def test_sources_begin_and_end_at_their_steps() -> None:
    made = config({"until_step": 4}, {"from_step": 3, "weight": 2.0}, {})
    assert phases_of(made, [[0], [0], [0]]) == [
        (0, [1.0, 0.0, 1.0]), (2 * 4, [1.0, 2.0, 1.0]), (4 * 4, [0.0, 2.0, 1.0]),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("temperature", "weights"), [(None, [1.0, 2.0]), (1.0, [16.0, 8.0]), (2.0, [4.0, 4.0])]
)
def test_sizes_count_by_the_temperature(temperature: float | None, weights: list[float]) -> None:
    made = config({}, {"weight": 2.0}, data={"size_temperature": temperature})
    assert phases_of(made, [range(16), range(4)]) == [(0, weights)]


@pytest.mark.parametrize(
    ("sources", "sections", "words"),
    [
        ([{"until_step": 4}, {"from_step": 6}], {}, "no source has prompts at step 5 of 10"),
        ([{"from_step": 2}], {}, "no source has prompts at step 1 of 10"),
        ([{"from_step": 4, "until_step": 3}], {}, "until_step of at least from_step"),
        (
            [{}],
            {"data": {"eval": [{"path": "y", "from_step": 2}]}},
            "found from_step or until_step",
        ),
        ([{}], {"train": {"epochs": 1}}, "'steps' or 'epochs', not both"),
    ],
)
def test_steps_without_prompts_and_other_contradictions_are_refused(
    sources: list[dict[str, Any]], sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        config(*sources, **sections)


@pytest.mark.parametrize("key", ["train", "eval"])
@pytest.mark.parametrize("source", ["x.jsonl", {"path": "x.jsonl"}])
def test_one_source_needs_no_list(key: str, source: str | dict[str, Any]) -> None:
    made, listed = (config({}, data={key: value}) for value in (source, [source]))
    assert getattr(made.data, key) == getattr(listed.data, key)


@pytest.mark.parametrize(("epochs", "steps"), [(1.0, 5), (2.0, 10), (0.5, 3), (1e-9, 1), (1.6, 8)])
def test_epochs_are_the_steps_that_the_rows_fill(epochs: float, steps: int) -> None:
    made = config({}, {})
    asked = made.model_copy(update={"train": made.train.model_copy(update={"epochs": epochs})})
    train = with_steps(asked, [range(12), range(8)]).train
    assert (train.steps, train.epochs) == (steps, None)
    assert with_steps(asked, [range(12), []]) == asked


def test_more_epochs_than_a_run_has_steps_are_refused() -> None:
    made = config({})
    asked = made.model_copy(update={"train": made.train.model_copy(update={"epochs": 1e12})})
    with pytest.raises(ConfigError, match=r"train.epochs: found 1e\+12, which is \d+ steps"):
        with_steps(asked, [range(12)])
