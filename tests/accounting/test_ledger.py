"""The ledger: every rollout once, whatever became of it."""

from __future__ import annotations

import pytest

from async_opd.accounting.ledger import Ledger
from async_opd.core.errors import (
    StageError,
)
from async_opd.core.samples import (
    Group,
    Header,
)
from tests.conftest import make_prompt


def header(uid: str) -> Header:
    return Header(uid, 1, 1, 0, "t")


def test_a_sample_trained_twice_stops_the_run() -> None:
    ledger = Ledger(1)
    ledger.admitted([make_prompt("p")])
    ledger.trained([header("p/0")], 1)
    with pytest.raises(StageError, match="came twice"):
        ledger.trained([header("p/0")], 1)


def test_the_ledger_counts_every_rollout_of_a_group() -> None:
    ledger = Ledger(3)
    ledger.admitted([make_prompt("p")])
    ledger.trained([header("p/1")], 1)
    assert (ledger.counts["in_flight"], ledger.counts["trained"]) == (2, 1)


def test_a_dead_letter_that_is_trained_stops_the_run() -> None:
    ledger = Ledger(1)
    ledger.admitted([make_prompt("p")])
    ledger.dead_lettered(header("p/0"))
    with pytest.raises(StageError, match="is a dead letter"):
        ledger.trained([header("p/0")], 1)


def test_a_copy_of_a_dead_letter_that_is_too_old_changes_nothing() -> None:
    ledger = Ledger(1)
    ledger.admitted([make_prompt("p")])
    ledger.dead_lettered(header("p/0"))
    assert ledger.requeued([header("p/0")]) == []
    assert (ledger.counts["trained"], ledger.counts["dead_lettered"]) == (0, 1)


def test_a_sample_that_came_too_late_runs_again_alone_and_stays_in_flight() -> None:
    ledger = Ledger(3)
    prompt = make_prompt("p")
    ledger.admitted([prompt])
    assert ledger.requeued([header("p/1")]) == [Group(prompt, (1,))]
    assert ledger.counts["in_flight"] == 3


def test_a_dead_letter_is_not_expected_any_more() -> None:
    ledger = Ledger(2)
    ledger.admitted([make_prompt("p")])
    ledger.dead_lettered(header("p/0"))
    assert (ledger.expects(header("p/0")), ledger.expects(header("p/1"))) == (False, True)
    assert (ledger.counts["dead_lettered"], ledger.counts["in_flight"]) == (1, 1)


def test_a_replacement_can_be_one_rollout_of_a_prompt() -> None:
    (group,) = Ledger(4).admitted([make_prompt("p")], members=1)
    assert group.members == (0,)
