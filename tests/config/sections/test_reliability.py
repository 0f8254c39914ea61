"""``checkpoint``: the bounds of its calls."""

from __future__ import annotations

from async_opd.config.sections.reliability import CheckpointConfig


def test_a_checkpoints_timeout_grows_with_its_bytes() -> None:
    """30 s, and 4 MiB at 2 MiB/s."""
    assert CheckpointConfig(timeout_s=30, min_mib_per_s=2).bound_s(4 << 20) == 32
