"""What a switch costs, of segments with known seconds."""

from __future__ import annotations

import pytest

from benchmarks.cpu_costs import Segment, interval, summary


def segments(*seconds: float) -> list[Segment]:
    """Segments of which a quarter is the driver's."""
    return [Segment({"driver": s / 4, "Trainer": 3 * s / 4}, 0.01, 0.02, 2.0) for s in seconds]


def test_the_cost_is_the_median_of_the_blocks_and_a_drift_falls_out_of_each() -> None:
    on, off = segments(1.02, 1.62, 9.0, 1.0), segments(1.2, 1.4, 1.0, 1.0)
    on += segments(2.04, 2.04)
    off += segments(2.0, 2.0)
    found = summary(on, off, samples=6000, activity_s=0.0)
    assert found["cost_share"] == 0.0200  # of 2.64 / 2.6 - 1, 10 / 2 - 1 and 4.08 / 4 - 1
    assert found["blocks"] == 3
    assert sum(found["cost_ms"].values()) == pytest.approx(1000 * (16.72 - 8.6) / 6, abs=0.2)
    assert found["cpu_ms_per_sample"] == round(1000 * 8.6 / 6000, 3)


def test_an_interval_holds_the_median_and_narrows_with_more_blocks() -> None:
    few, many = [0.0, 0.01, 0.02, 0.05], [0.0, 0.01, 0.02, 0.05] * 50
    wide, narrow = interval(few), interval(many)
    assert wide[0] <= 0.015 <= wide[1]
    assert narrow[1] - narrow[0] < wide[1] - wide[0]
