"""Tokens that trained nothing, by reason, and their share."""

from __future__ import annotations

import pytest

from async_opd.accounting.run_state import Waste
from async_opd.core.reports import StepReport
from async_opd.core.samples import Header


def headers(*tokens: int) -> tuple[Header, ...]:
    return tuple(Header(f"p{i}/0", n, 0, 0, "t") for i, n in enumerate(tokens))


def report(*tokens: int, skipped: str = "", duplicated: float = 0.0) -> StepReport:
    metrics = {"train/duplicate_tokens": duplicated}
    return StepReport(1, headers(*tokens), (), metrics, skipped=skipped)


def test_stale_dead_skipped_and_duplicated_tokens_are_wasted() -> None:
    waste = Waste()
    assert waste.metrics["waste/share"] == 0
    waste.step(report(10, 20, duplicated=7.0))
    assert waste.metrics["waste/duplicated_tokens"] == 7
    waste.step(report(5, skipped="loss nan", duplicated=7.0))  # a sum already: not added again
    waste.stale(headers(3, 5))
    waste.dead += 2
    assert waste.metrics == {
        "waste/requeued_tokens": 8.0,
        "waste/dead_tokens": 7.0,
        "waste/duplicated_tokens": 7.0,
        "waste/share": pytest.approx(22 / 52),
    }
