"""The ledger: every rollout once, whatever became of it."""

from __future__ import annotations

import pytest

from async_opd.accounting.ledger import Ledger
from async_opd.core.errors import StageError
from async_opd.core.samples import Group, Header
from tests.conftest import make_prompt

PROMPT = make_prompt("p")


def header(uid: str) -> Header:
    return Header(uid, 1, 1, 0, "t")


def ledger(n: int) -> Ledger:
    """With one group of a prompt."""
    made = Ledger(n)
    made.admitted([PROMPT])
    return made


def test_a_sample_trained_twice_stops_the_run() -> None:
    made = ledger(1)
    made.trained([header("p/0")], 1)
    with pytest.raises(StageError, match="came twice"):
        made.trained([header("p/0")], 1)


def test_a_dead_letter_that_is_trained_stops_the_run_and_a_copy_that_is_too_old_does_not() -> None:
    made = ledger(1)
    made.dead_lettered(header("p/0"))
    assert made.requeued([header("p/0")]) == []
    assert (made.counts["trained"], made.counts["dead_lettered"]) == (0, 1)
    with pytest.raises(StageError, match="is a dead letter"):
        made.trained([header("p/0")], 1)


def test_every_rollout_of_a_group_is_counted_and_expected_until_its_end() -> None:
    made = ledger(3)
    made.trained([header("p/1")], 1)
    made.dead_lettered(header("p/0"))
    assert made.counts == {"in_flight": 1, "trained": 1, "dead_lettered": 1, "requeued": 0}
    assert [made.expects(header(f"p/{member}")) for member in (0, 2)] == [False, True]


def test_a_sample_that_came_too_late_runs_again_alone_and_stays_in_flight() -> None:
    made = ledger(3)
    assert made.requeued([header("p/1")]) == [Group(PROMPT, (1,))]
    assert made.counts["in_flight"] == 3


def test_a_replacement_can_be_one_rollout_of_a_prompt() -> None:
    (group,) = Ledger(4).admitted([PROMPT], members=1)
    assert group.members == (0,)
