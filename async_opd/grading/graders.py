"""Graders: (response text, row) → 0 to 1, and the answer that they read from the response."""

from __future__ import annotations

import functools
import importlib
import json
from collections.abc import Callable
from typing import Any, Self

from async_opd.core.errors import RolloutFault
from async_opd.core.row import Row

RETURNS = "a grader must return a number from 0 to 1 for every response"
"""Or that and the extracted answer, as a pair; docs/evaluation.md."""


class Grade(float):
    """A score from 0 to 1. ``answer`` is what the grader read from the response, if it says so."""

    answer: str | None

    def __new__(cls, score: float, answer: str | None = None) -> Self:
        """The answer of a Grade stays."""
        made = super().__new__(cls, score)
        made.answer = answer if answer is not None else getattr(score, "answer", None)
        return made


Grader = Callable[[str, Row], Any]
"""Returns a number from 0 to 1, or the number and the extracted answer (text, or None)."""


class GradeError(RolloutFault):
    """A grader failed on a row, or returned something else than a number from 0 to 1."""


def load_grader(name: str) -> Callable[[str, Row], Grade]:
    """``exact``, ``math_verify`` or ``module:function``; reasoning-gym rows by their own verifier.

    Raises ImportError, AttributeError or ValueError if there is no such grader.
    """
    chosen = _named(name)

    def grade(response: str, row: Row) -> Grade:
        grader, label = (reasoning_gym, "reasoning_gym") if has_verifier(row) else (chosen, name)
        try:
            value = _grade_of(grader(response, row))
        except MemoryError as error:
            raise GradeError(
                "grader",
                f"{label} needed more memory on row {row.uid} than grading.memory_gb",
                "make it need less, or raise grading.memory_gb",
            ) from error
        except (Exception, SystemExit) as error:
            raise GradeError(
                "grader",
                f"{label} failed on row {row.uid}: {type(error).__name__}: {error}",
                RETURNS,
            ) from error
        if not 0 <= value <= 1:
            raise GradeError(
                "grader",
                f"{label} returned {value} on row {row.uid}",
                RETURNS,
            )
        return value

    return grade


def _grade_of(returned: Any) -> Grade:
    """TypeError or ValueError for anything but a number, or a number and an answer."""
    if not isinstance(returned, tuple):
        return Grade(float(returned), getattr(returned, "answer", None))
    score, answer = returned
    return Grade(float(score), None if answer is None else str(answer))


def has_verifier(row: Row) -> bool:
    """Whether the row's own task grades it, whatever the configured grader."""
    return row.task is not None


def _named(name: str) -> Grader:
    if name == "exact":
        return exact
    if name == "math_verify":
        importlib.import_module("math_verify")
        return math_verify
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"{name!r} is neither exact, math_verify nor module:function")
    grader = getattr(importlib.import_module(module), function)
    if not callable(grader):
        raise ValueError(f"{name} is {type(grader).__name__}, not a function")
    return grader  # type: ignore[no-any-return]


def exact(response: str, row: Row) -> Grade:
    """1 if the response equals the answer, white space around both ignored."""
    found = response.strip()
    return Grade(float(row.answer is not None and found == row.answer.strip()), found)


def math_verify(response: str, row: Row) -> Grade:
    """1 if both are the same mathematical value; ``grading.timeout_s`` replaces its timeouts."""
    from math_verify import parse, verify

    answer = str(row.answer)
    bare = "$" not in answer and "\\boxed" not in answer  # math_verify reads LaTeX only in these
    gold = parse(f"${answer}$" if bare else answer, parsing_timeout=None)
    if not gold:
        raise ValueError(f"the answer {row.answer!r} cannot be read as mathematics")
    found = parse(response, parsing_timeout=None)
    score = float(verify(gold, found, timeout_seconds=None))
    return Grade(score, str(found[0]) if found else None)


def reasoning_gym(response: str, row: Row) -> Grade:
    """The score of the row's own task."""
    assert row.task is not None
    task = _task(row.task.name, json.dumps(row.task.options, sort_keys=True))
    found = response.strip()
    return Grade(float(task.score_answer(answer=found, entry=row.fields)), found)


@functools.cache
def _task(name: str, options: str) -> Any:
    """The task with the options with which its rows were made: some verifiers read them."""
    import reasoning_gym as gym

    return gym.create_dataset(name, size=1, seed=0, **json.loads(options))
