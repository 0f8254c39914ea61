"""What is lent: numbers, times, and whose it is."""

from __future__ import annotations

import time

import pytest

from async_opd.core.batch import Batch
from async_opd.core.stages import Lease
from async_opd.queue.topic import LeaseTable
from tests.conftest import make_rollout
from tests.world.clock import ManualTimer


def batches(*uids: str) -> tuple[Batch, ...]:
    return (Batch.pack(make_rollout(uid) for uid in uids),)


def test_a_loan_that_is_taken_back_is_counted_no_longer_and_does_not_expire() -> None:
    timer, late = ManualTimer(), list[Lease]()
    loans = LeaseTable(10, timer, lambda entry: late.append(entry.lease))
    lease = loans.grant(batches("a", "b"), "x")
    assert (len(loans), loans.of("x")) == (2, [lease])
    assert loans.remove(lease.id) == lease
    assert (len(loans), loans.of("x"), loans.remove(lease.id)) == (0, [], None)
    second = loans.grant(batches("c"), "x")
    timer.advance(11)
    assert (late, len(loans)) == ([second], 1)


def test_numbers_of_an_earlier_life_are_known_as_such_though_the_clock_is_behind_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time_ns", iter(range(10**9, 0, -1)).__next__)
    old = LeaseTable(10, ManualTimer(), lambda entry: None).grant(batches("a"), "x")
    new = LeaseTable(10, ManualTimer(), lambda entry: None)
    assert new.predates_restart(old.id)
    assert not new.predates_restart(new.grant(batches("a"), "x").id)
