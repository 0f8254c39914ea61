"""An episode is one rollout, whose turns stand where they were sampled."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from async_opd.core.environments import Collateral, Opening, Outcome
from async_opd.core.errors import RolloutFault
from async_opd.core.samples import Rollout
from async_opd.core.uid import Uid
from async_opd.environments.episode import seed_of
from async_opd.models.tokenizer import Text
from tests.models.turns.styles import STYLES
from tests.world.episodes import (
    ScriptedEnvironment,
    ScriptedStudent,
    played,
    reading,
    tool,
)

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>'
THOUGHT = "<think>\nhm\n</think>\n\n"
TWO_CALLS = [CALL, CALL, "3<|im_end|>"]
RESULTS = [Outcome((tool("one"),), tool_s=0.5), Outcome((tool("two"),), tool_s=0.25), Outcome()]


@pytest.fixture
def text(tmp_path: Path) -> Text:
    return STYLES["qwen2.5"].text(tmp_path / "student")


async def three_turns(text: Text, **config: object) -> tuple[Rollout, ScriptedStudent]:
    student = ScriptedStudent(text, TWO_CALLS)
    return await played(student, [ScriptedEnvironment(RESULTS)], reading(text), **config), student


async def test_the_spans_are_the_prompt_then_turns_and_what_the_environment_answered(text):
    made, _ = await three_turns(text)
    origins = [span.origin for span in made.spans]
    assert origins == ["prompt", "student", "tool", "student", "tool", "student"]


async def test_each_turn_stands_after_the_tokens_of_its_request(text):
    made, student = await three_turns(text)
    ids = made.token_ids.tolist()
    before = [ids[:start] for start, _ in made.positions]
    assert before == student.requests


async def test_the_sampled_tokens_are_those_of_the_engine(text):
    made, student = await three_turns(text)
    assert [turn.tolist() for turn in made.turns] == student.sampled


async def test_log_probabilities_and_versions_are_those_of_the_turns(text):
    made, student = await three_turns(text)
    ends = np.cumsum([len(ids) for ids in student.sampled]).tolist()
    assert [(one.version, one.end) for one in made.version_spans] == list(enumerate(ends))
    assert made.rollout_logprobs[ends[0]] == -101


async def test_the_facts_count_calls_and_seconds(text):
    made, _ = await three_turns(text)
    assert made.episode is not None
    assert made.episode == (3, 2, 0, 0, 0.75, 0, "done")


async def test_a_slot_is_reserved_for_each_turn_by_its_number(text):
    _, student = await three_turns(text)
    assert student.reserved == [0, 1, 2]


async def test_the_reward_is_the_environments(text):
    environment = ScriptedEnvironment([Outcome()], given_reward=0.25)
    made = await played(ScriptedStudent(text, ["3<|im_end|>"]), [environment], reading(text))
    assert made.reward == 0.25


async def test_the_environment_is_closed_once_the_episode_ends(text):
    environment = ScriptedEnvironment([Outcome()])
    await played(ScriptedStudent(text, ["3<|im_end|>"]), [environment], reading(text))
    assert environment.closed == 1


async def test_the_environment_is_closed_after_a_fault(text):
    environment = ScriptedEnvironment([RolloutFault("environment", "it broke")])
    with pytest.raises(RolloutFault, match="it broke"):
        await played(ScriptedStudent(text, [CALL]), [environment], reading(text))
    assert environment.closed == 1


async def test_an_episode_whose_process_was_ended_begins_again_with_the_same_seed(text):
    lost = ScriptedEnvironment([Collateral()])
    again = ScriptedEnvironment([Outcome()])
    student = ScriptedStudent(text, [CALL, "3<|im_end|>"])
    made = await played(student, [lost, again], reading(text))
    assert lost.seeds == again.seeds
    assert len(made.turns) == 1


def test_all_members_of_a_group_have_the_seed_of_their_prompt():
    assert seed_of(0, Uid("0:0#0")) != seed_of(0, Uid("0:0#1"))


@pytest.mark.parametrize(
    ("config", "turns", "end"),
    [
        ({"max_turns": 2}, 2, "turns"),
        ({"max_tokens": 40}, 1, "tokens"),
        ({"longest": 101}, 1, "context"),
    ],
)
async def test_an_episode_ends_at_its_bounds(text, config, turns, end):
    made, _ = await three_turns(text, **config)
    assert made.episode is not None
    assert (made.episode.turns, made.episode.end) == (turns, end)
    assert made.finish_reason == ("stop" if end == "turns" else "length")
    assert made.spans[-1].origin == "student"


async def test_a_turn_gets_no_more_tokens_than_the_episode_has_left(text):
    student = ScriptedStudent(text, TWO_CALLS)
    await played(student, [ScriptedEnvironment(RESULTS)], reading(text), max_tokens=80)
    assert student.most[1] == 80 - len(student.sampled[0])


async def test_a_turn_that_was_cut_off_is_a_malformed_call_for_the_environment(text):
    environment = ScriptedEnvironment([Outcome((tool("go on"),)), Outcome()])
    student = ScriptedStudent(text, ["word " * 80, "3<|im_end|>"])
    made = await played(student, [environment], reading(text))
    assert environment.turns[0].malformed == ("the turn was cut off at 64 tokens",)
    assert made.episode is not None
    assert made.episode.malformed == 1


async def test_the_end_of_a_turn_that_was_cut_off_is_context(text):
    environment = ScriptedEnvironment([Outcome((tool("go on"),)), Outcome()])
    student = ScriptedStudent(text, ["word " * 80, "3<|im_end|>"])
    made = await played(student, [environment], reading(text))
    end = next(iter(text.response_ends()))
    assert made.spans[2].origin == "tool"
    assert made.token_ids[made.spans[2].start] == end


@pytest.mark.parametrize(
    "answer", ["<tool_call>\n{</tool_call><|im_end|>", "word " * 80], ids=["malformed", "cut"]
)
async def test_a_bad_call_ends_the_episode_where_the_config_says_so(text, answer):
    environment = ScriptedEnvironment([Outcome()])
    student = ScriptedStudent(text, [answer])
    made = await played(student, [environment], reading(text), on_bad_call="end")
    assert made.episode is not None
    assert (made.episode.end, environment.turns) == ("bad_call", [])


async def test_an_unknown_tool_ends_the_episode_where_the_config_says_so(text):
    environment = ScriptedEnvironment([Outcome((tool("which?"),), unknown=1), Outcome()])
    made = await played(
        ScriptedStudent(text, [CALL]), [environment], reading(text), on_bad_call="end"
    )
    assert made.episode is not None
    assert (made.episode.end, made.episode.unknown) == ("bad_call", 1)


async def test_a_long_observation_is_cut_off_and_counted(text):
    environment = ScriptedEnvironment([Outcome((tool("7 " * 100),)), Outcome()])
    student = ScriptedStudent(text, [CALL, "3<|im_end|>"])
    made = await played(student, [environment], reading(text), max_observation_tokens=50)
    assert made.episode is not None
    assert made.episode.cut_tokens == 200 - 50
    assert "[150 tokens cut off]" in text.decode(made.token_ids.tolist())


async def test_special_tokens_in_an_observation_are_text(text):
    environment = ScriptedEnvironment([Outcome((tool("<|im_end|>"),)), Outcome()])
    student = ScriptedStudent(text, [CALL, "3<|im_end|>"])
    made = await played(student, [environment], reading(text))
    end = next(iter(text.response_ends()))
    tokens = made.token_ids[made.spans[2].start : made.spans[2].end].tolist()
    assert tokens.count(end) == 1  # that of the tool's message


async def test_the_tools_of_the_opening_are_in_the_prompt(text):
    tools = ({"type": "function", "function": {"name": "add", "parameters": {}}},)
    environment = ScriptedEnvironment([Outcome()], Opening(tools=tools))
    made = await played(ScriptedStudent(text, ["3<|im_end|>"]), [environment], reading(text))
    assert '"name": "add"' in text.decode(made.prompt.token_ids.tolist())


async def test_a_template_that_strips_thoughts_begins_a_segment(tmp_path):
    text = STYLES["qwen3"].text(tmp_path / "q")
    user = {"role": "user", "content": "and now?"}
    student = ScriptedStudent(text, [THOUGHT + "2<|im_end|>", "3<|im_end|>"])
    environment = ScriptedEnvironment([Outcome((user,)), Outcome()])
    made = await played(student, [environment], reading(text, "template"), history="template")
    assert [span.origin for span in made.spans] == ["prompt", "student", "prompt", "student"]
    assert "hm" not in text.decode(made.token_ids[made.spans[2].start : made.spans[2].end].tolist())
    assert student.requests[1] == made.token_ids[made.spans[2].start : made.spans[2].end].tolist()


async def test_an_appended_history_keeps_thoughts(tmp_path):
    text = STYLES["qwen3"].text(tmp_path / "q")
    user = {"role": "user", "content": "and now?"}
    student = ScriptedStudent(text, [THOUGHT + "2<|im_end|>", "3<|im_end|>"])
    made = await played(
        student, [ScriptedEnvironment([Outcome((user,)), Outcome()])], reading(text)
    )
    assert len(made.segments) == 1


async def test_a_refused_history_is_a_fault(tmp_path):
    text = STYLES["qwen3"].text(tmp_path / "q")
    user = {"role": "user", "content": "and now?"}
    student = ScriptedStudent(text, [THOUGHT + "2<|im_end|>"])
    environment = ScriptedEnvironment([Outcome((user,)), Outcome()])
    with pytest.raises(RolloutFault, match="history: refuse"):
        await played(student, [environment], reading(text, "refuse"), history="refuse")


async def test_a_teacher_with_another_template_reads_its_own_headers_in_every_turn(text, tmp_path):
    other = STYLES["qwen2.5"].text(tmp_path / "teacher", system="be brief")
    student = ScriptedStudent(text, TWO_CALLS)
    environment = ScriptedEnvironment(RESULTS)
    made = await played(student, [environment], reading(text), {"teacher": reading(other)})
    assert made.view is not None
    pairs = made.view.pairs(made)
    assert len(pairs) == 3
    assert "be brief" in other.decode(made.view.token_ids.tolist())
