"""A small soak over real Ray actors: nothing is lost or comes twice, and the numbers are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.soak import BATCH, LONG, SAMPLE_BYTES, soak

pytestmark = pytest.mark.engine


async def test_every_rollout_of_a_small_soak_is_trained_once(tmp_path: Path) -> None:
    assert LONG * SAMPLE_BYTES >= 16 << 20
    found = await soak(short=12 * BATCH - 6, long=6, run_dir=tmp_path)
    assert (found["lost"], found["duplicated"]) == (0, 0)
    assert found["rollouts"] == 12 * BATCH
    assert set(found["loop_lag_s"]) == {"driver", "queue", "scorer"}
    assert found["peak_memory_gib"] < 8
