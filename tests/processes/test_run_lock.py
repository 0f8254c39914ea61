"""Whether a process works in a run directory is known by its lock."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

from async_opd.core.errors import ConfigError
from async_opd.processes import run_lock as module
from async_opd.processes.run_lock import is_locked, run_lock


def test_a_run_directory_is_locked_while_a_process_works_in_it(tmp_path: Path) -> None:
    assert is_locked(tmp_path) is False
    with run_lock(tmp_path):
        assert is_locked(tmp_path) is True
    assert is_locked(tmp_path) is False


def test_nothing_is_known_without_the_directory_or_without_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(handle: int, operation: int) -> None:
        raise OSError("no locks here")

    assert is_locked(tmp_path / "gone") is None
    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert is_locked(tmp_path) is None


def test_a_look_at_the_lock_does_not_refuse_a_run_that_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_lock(tmp_path) as _:
        pauses = list[float]()
        monkeypatch.setattr(module.time, "sleep", pauses.append)
        with pytest.raises(ConfigError, match="another process runs in"), run_lock(tmp_path):
            pass
    assert pauses == [module.AGAIN_S]
