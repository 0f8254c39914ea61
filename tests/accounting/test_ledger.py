"""The ledger: every rollout once, whatever became of it."""

from __future__ import annotations

import pytest

from async_opd.accounting.ledger import Ledger
from async_opd.core.errors import StageError
from async_opd.core.samples import Group, Header
from tests.conftest import make_prompt

PROMPT = make_prompt("p")


def header(member: int) -> Header:
    return Header(f"p/{member}", 1, 1, 0, "t")


def test_what_is_finished_stops_the_run_if_it_is_trained_and_a_copy_too_old_does_not() -> None:
    made = Ledger(2)
    made.admitted([PROMPT])
    made.trained([header(0)], 1)
    made.dead_lettered(header(1))
    assert made.requeued([header(1)]) == []
    assert (made.counts["trained"], made.counts["dead_lettered"]) == (1, 1)
    for member, cause in ((0, "came twice"), (1, "is a dead letter")):
        with pytest.raises(StageError, match=cause):
            made.trained([header(member)], 1)


def test_every_rollout_of_a_group_is_counted_and_expected_until_its_end() -> None:
    made = Ledger(3)
    made.admitted([PROMPT])
    assert made.requeued([header(1)]) == [Group(PROMPT, (1,))]
    assert made.counts["in_flight"] == 3
    made.trained([header(1)], 1)
    made.dead_lettered(header(0))
    assert made.counts == {"in_flight": 1, "trained": 1, "dead_lettered": 1, "requeued": 1}
    assert [made.expects(header(member)) for member in (0, 2)] == [False, True]
