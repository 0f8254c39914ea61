"""The short form of ``python -m benchmarks.checkpoint``: two ranks with a student of one layer."""

from __future__ import annotations

import pytest

from benchmarks.checkpoint import checkpoints, sharded

pytestmark = pytest.mark.slow


def test_a_checkpoint_takes_one_copy_of_its_share_in_each_rank() -> None:
    found = checkpoints(layers=1, way=sharded)
    assert 0.9 < found["peak_ratio"] < 1.3
    assert found["share_mb"] > 100
