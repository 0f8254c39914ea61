"""Rewards: graded with the row, which travels no further."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.errors import StageError
from async_opd.core.row import Row
from async_opd.core.samples import Rollout
from async_opd.core.sequence import spans_of
from async_opd.grading.grader_pool import GraderSpec
from async_opd.grading.graders import GradeError
from async_opd.models.tokenizer import Text
from rollouter.rollout_worker import RewardGrader
from tests.conftest import make_prompt, make_rollout

MODULE = """
def broken(response, row):
    raise ZeroDivisionError("oh")

def two(response, row):
    return 2
"""


def rollout(student: str, text: str, answer: str = "012") -> Rollout:
    """A response with its row."""
    ids = np.array(Text(student).encode(text), np.int32)
    row = Row("0:7", "sort", "sort 210=", answer, {})
    made = make_rollout("0:7#0/1", tokens=len(ids))
    return replace(made, continuation=ids, prompt=replace(make_prompt("0:7#0"), row=row))


@pytest.fixture
def student(quickstart: str) -> str:
    return f"{quickstart}/models/student"


def grading(student: str, grader: str = "exact") -> RewardGrader:
    return RewardGrader(GraderSpec(grader, GradingConfig(processes=1), start_s=60), student)


@pytest.mark.parametrize(("text", "reward"), [("012", 1.0), ("021", 0.0), ("", 0.0)])
async def test_a_rollout_gets_its_graders_number(student: str, text: str, reward: float) -> None:
    graded = await grading(student).grade(rollout(student, text))
    assert graded.reward == reward


async def test_the_texts_of_all_turns_are_graded_one_a_line(student: str) -> None:
    whole, tool = rollout(student, "012"), np.array(Text(student).encode("99"), np.int32)
    own = whole.response_ids
    spans = [("prompt", 3), ("student", 1), ("tool", len(tool)), ("student", len(own) - 1)]
    turns = replace(
        whole, continuation=np.concatenate([own[:1], tool, own[1:]]), spans=spans_of(spans)
    )
    row = replace(turns.prompt.row, answer="0\n12")  # type: ignore[type-var]
    turns = replace(turns, prompt=replace(turns.prompt, row=row))
    assert (await grading(student).grade(turns)).reward == 1


async def test_the_row_travels_no_further_and_is_needed(student: str) -> None:
    graded = await grading(student).grade(rollout(student, "012"))
    assert graded.prompt.row is None
    with pytest.raises(StageError, match="without its prompt's row"):
        await grading(student).grade(make_rollout())


@pytest.mark.parametrize(
    ("function", "fault"), [("broken", "ZeroDivisionError: oh"), ("two", "returned 2")]
)
async def test_what_a_grader_does_wrong_is_reported_with_the_rollout(
    student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, fault: str
) -> None:
    (tmp_path / "faulty_graders.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made = grading(student, f"faulty_graders:{function}")
    with pytest.raises(GradeError, match=rf"rollout 0:7#0/1: .*{fault}"):
        await made.grade(rollout(student, "012"))
    made.close()
