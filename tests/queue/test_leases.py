"""What is lent: numbers, times, and whose it is."""

from __future__ import annotations

import math
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
    timer.advance(11)
    assert late == []


def test_who_lent_it_is_told_when_its_time_is_over() -> None:
    timer, late = ManualTimer(), list[Lease]()
    loans = LeaseTable(10, timer, lambda entry: late.append(entry.lease))
    lease = loans.grant(batches("a"), "x")
    timer.advance(11)
    assert late == [lease]
    assert len(loans) == 1


def test_without_a_bound_no_timer_runs() -> None:
    timer = ManualTimer()
    LeaseTable(math.inf, timer, lambda entry: None).grant(batches("a"), "x")
    assert timer.due == []


def test_numbers_of_an_earlier_life_are_known_as_such_though_the_clock_is_behind_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time_ns", iter(range(10**9, 0, -1)).__next__)
    old = LeaseTable(10, ManualTimer(), lambda entry: None).grant(batches("a"), "x")
    new = LeaseTable(10, ManualTimer(), lambda entry: None)
    assert new.predates_restart(old.id)
    assert not new.predates_restart(new.grant(batches("a"), "x").id)
