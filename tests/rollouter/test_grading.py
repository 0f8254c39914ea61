"""Rewards: graded in a thread, with the row, which travels no further."""

from __future__ import annotations

import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from async_opd.core.errors import StageError
from async_opd.core.graders import GradeError
from async_opd.core.samples import Rollout
from async_opd.core.sources import Row
from async_opd.core.text import Text
from rollouter.grading import Grading
from tests.conftest import make_prompt, make_rollout

THREADS: list[str] = []


def half(response: str, row: Row) -> float:
    """A grader that remembers its thread."""
    THREADS.append(threading.current_thread().name)
    return 0.5


def broken(response: str, row: Row) -> float:
    """A grader that raises."""
    raise ZeroDivisionError("oh")


def rollout(student: str, text: str, answer: str = "012") -> Rollout:
    """A response with its row."""
    ids = np.array(Text(student).encode(text), np.int32)
    row = Row("0:7", "sort", "sort 210=", answer, {})
    made = make_rollout("0:7#0/1", tokens=len(ids))
    return replace(made, response_ids=ids, prompt=replace(make_prompt("0:7#0"), row=row))


@pytest.fixture
def student(quickstart: str) -> str:
    return f"{quickstart}/models/student"


@pytest.mark.parametrize(("text", "reward"), [("012", 1.0), ("021", 0.0), ("", 0.0)])
async def test_a_rollout_gets_its_graders_number(student: str, text: str, reward: float) -> None:
    graded = await Grading("exact", student).grade(rollout(student, text))
    assert graded.reward == reward


async def test_the_row_travels_no_further(student: str) -> None:
    graded = await Grading("exact", student).grade(rollout(student, "012"))
    assert graded.prompt.row is None


async def test_graders_run_beside_the_event_loop(student: str) -> None:
    await Grading(f"{__name__}:half", student).grade(rollout(student, "012"))
    assert THREADS[-1] != threading.main_thread().name


async def test_a_grader_that_raises_is_reported_with_the_rollout(student: str) -> None:
    with pytest.raises(GradeError, match=r"rollout 0:7#0/1: .*ZeroDivisionError: oh"):
        await Grading(f"{__name__}:broken", student).grade(rollout(student, "012"))


async def test_a_grade_outside_of_its_range_is_reported_with_the_rollout(
    student: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_grader.py").write_text("def grade(response, row): return 2")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(GradeError, match=r"rollout 0:7#0/1: .* returned 2"):
        await Grading("own_grader:grade", student).grade(rollout(student, "012"))
    sys.modules.pop("own_grader")


async def test_a_prompt_without_its_row_is_an_error(student: str) -> None:
    with pytest.raises(StageError, match="without its prompt's row"):
        await Grading("exact", student).grade(make_rollout())
