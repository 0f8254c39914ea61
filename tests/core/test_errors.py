"""Errors travel between processes."""

from __future__ import annotations

import pickle

import pytest

from async_opd.core.errors import (
    ConfigError,
    EngineStartError,
    LeaseExpired,
    Problem,
    StageError,
    WeightSyncError,
    WorkersFailed,
)


@pytest.mark.parametrize(
    "error",
    [
        StageError("student/0", "cause", "remedy"),
        EngineStartError("t", "cause"),
        WeightSyncError("s", "cause", "remedy"),
        LeaseExpired("scored", 3),
        WorkersFailed("student/0", "sleep", ("", "MemoryError: no room")),
        ConfigError([Problem("f", "k", "m", "r")]),
    ],
)
def test_errors_survive_the_way_between_processes(error: Exception) -> None:
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
