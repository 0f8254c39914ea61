"""Which evaluations a run has to make, and where they are logged."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.accounting.ledger import LedgerState
from async_opd.accounting.run_state import Cut
from async_opd.grading.evaluation_runs import Evaluations
from tests.world.config import run_config


def evaluations(
    steps: int = 20, k: int = 3, logged: int = -1, log: Any = None, **period: int
) -> Evaluations:
    sections = {"train": {"steps": steps}, "async": {"sync_steps": k}}
    return Evaluations(run_config(**sections, eval=period or {"every": 2}), log, logged)


def cut(step: int, k: int = 3) -> Cut:
    return Cut(step, step // k, 0, 0, LedgerState())


def test_a_version_belongs_to_the_step_that_completes_it() -> None:
    assert [evaluations().step_of(version) for version in (0, 1, 6, 7)] == [0, 3, 18, 20]


def test_every_second_version_is_due_but_the_last_which_has_its_own() -> None:
    made = evaluations(steps=18)
    assert [step for step in range(1, 19) if made.is_due(step)] == [6, 12]


@given(st.integers(1, 40), st.integers(1, 5), st.integers(0, 5), st.integers(0, 40))
def test_a_version_is_due_when_so_many_steps_are(steps: int, k: int, every: int, at: int) -> None:
    versions = evaluations(steps=steps, k=k, every=every)
    due = {step for step in range(1, steps + 1) if versions.is_due(step)}
    of_versions = range(every, -(-steps // k), every) if every else range(0)
    assert due == {versions.step_of(version) for version in of_versions}
    if every:
        in_steps = evaluations(steps=steps, k=k, every_steps=every * k)
        assert due == {step for step in range(1, steps + 1) if in_steps.is_due(step)}
        assert in_steps.is_missing(cut(at, k)) == versions.is_missing(cut(at, k))


@given(
    steps=st.integers(1, 40),
    k=st.integers(1, 5),
    every_steps=st.integers(1, 9),
    stops=st.lists(st.integers(0, 40), max_size=4),
)
def test_a_resume_at_any_steps_leaves_no_due_step_out_and_adds_none(
    steps: int, k: int, every_steps: int, stops: list[int]
) -> None:
    logged: list[int] = []
    for start, end in pairwise([0, *(one for one in stops if one < steps), steps]):
        # a resume cuts later rows, and a kill may have come before the checkpoint's own
        logged = [step for step in logged if step < start]
        made = evaluations(steps, k, max(logged, default=-1), every_steps=every_steps)
        if start and made.is_missing(cut(start, k)):
            logged.append(start)
        logged += [step for step in range(start + 1, end + 1) if made.is_due(step)]
    due = list(range(every_steps, steps, every_steps))
    assert logged == due


def test_nothing_is_due_or_missing_where_there_are_no_evaluations_between() -> None:
    made = evaluations(every=0)
    assert not any(made.is_due(step) for step in range(21))
    assert not made.is_missing(cut(12))


@pytest.mark.parametrize(
    ("step", "logged", "missing"),
    [
        (5, 0, False),  # version 1: none was due
        (6, 0, True),
        (6, 6, False),
        (8, 0, True),  # on the way to version 3
        (10, 6, False),  # version 3 has no answer
        (10, 0, True),  # that of version 2 was interrupted
        (12, 6, True),
        (13, 12, False),
        (13, 13, False),  # repeated with a checkpoint's weights
    ],
)
def test_what_was_due_before_the_checkpoint_and_is_not_logged_is_missing(
    step: int, logged: int, missing: bool
) -> None:
    assert evaluations(logged=logged).is_missing(cut(step)) is missing


@given(st.integers(-1, 30))
def test_the_last_evaluation_is_missing_until_it_is_logged(logged: int) -> None:
    assert evaluations(logged=logged).is_last_missing is (logged < 20)


class Lines(list[str]):
    """A log of messages."""

    def message(self, text: str, level: str = "info") -> None:
        self.append(text)

    def summarize(self, metrics: Mapping[str, float]) -> None: ...
    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...


@pytest.mark.parametrize(
    ("newest", "versions"), [({}, "version 4"), ({"eval/newest_version": 6.0}, "versions 4 to 6")]
)
def test_a_line_names_the_versions_of_the_answers(newest: dict[str, float], versions: str) -> None:
    lines = Lines()
    evaluations(k=1, log=lines).log({"eval/a/accuracy": 0.5} | newest, 4, 4)
    assert lines[-1] == f"step 4, {versions}: eval/a 50.0%"


def test_due_evaluations_that_there_will_never_be_are_named_when_the_next_one_is_logged() -> None:
    lines = Lines()
    made = evaluations(steps=40, k=1, logged=4, log=lines, every=2)
    made.skip(8, "the one before was still under way")
    made.log({"eval/a/accuracy": 0.5}, 15, 15)
    made.log({"eval/a/accuracy": 0.5}, 18, 18)
    assert [line.partition("; ")[0] for line in lines if "no evaluation" in line] == [
        "step 8: no evaluation, since the one before was still under way",
        "steps 6 to 14: no evaluation, since the run was interrupted, or eval.every was another",
        "step 16: no evaluation, since the run was interrupted, or eval.every was another",
    ]


@pytest.mark.parametrize("key", ["eval_initial/a/accuracy", "eval_teacher/a/accuracy"])
def test_evaluations_before_training_name_no_other(key: str) -> None:
    lines = Lines()
    evaluations(log=lines).log({key: 0.5}, 0, 0)
    assert len(lines) == 1
