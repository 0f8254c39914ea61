"""The file that shows a viewer that the run's process lives."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from async_opd.observability.live.live_file import LIVE_FILE, LiveFile, read_live, started_at
from tests.observability.live.test_console import summary
from tests.observability.test_run_log import Clock


class Turns:
    """An event that is not set for so many waits."""

    def __init__(self, turns: int) -> None:
        self._left = turns

    def wait(self, seconds: float) -> bool:
        self._left -= 1
        return self._left < 0


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def sink(tmp_path: Path, clock: Clock) -> LiveFile:
    made = LiveFile(tmp_path, clock)
    made.start()
    return made


def test_the_file_names_the_process_and_what_pools_wait_for(
    sink: LiveFile, tmp_path: Path, clock: Clock
) -> None:
    clock.now += 5
    sink.waits({"rollout": "prompts", "train": "x" * 10_000})
    sink.beat()
    live = read_live(tmp_path)
    assert live is not None
    assert (live.pid, live.is_here, live.has_process) == (os.getpid(), True, True)
    assert (live.started, live.time) == (1_000_000.0, 1_000_005.0)
    assert (live.waits["rollout"], len(live.waits["train"])) == ("prompts", 200)
    assert (tmp_path / LIVE_FILE).stat().st_mode & 0o777 == 0o600
    assert sink.close(summary()) is None
    assert read_live(tmp_path) is None
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_has_ended_is_known_by_its_id_and_its_begin() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert started_at(child.pid) >= started_at(os.getpid()) > 0
    child.kill()
    child.wait()
    assert started_at(child.pid) != started_at(os.getpid())


def test_a_disk_that_answers_again_has_the_file_again(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    sink, wrote = LiveFile(tmp_path, clock), []
    answers = iter([OSError("stale handle"), None])

    def beat() -> None:
        wrote.append(clock.now)
        if (answer := next(answers)) is not None:
            raise answer

    monkeypatch.setattr(sink, "beat", beat)
    monkeypatch.setattr(sink, "_ended", Turns(2))
    sink._beats()
    assert len(wrote) == 2
    with pytest.raises(OSError, match="stale handle"):
        sink.waits({})
    sink.waits({})


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"pid": "x"}', json.dumps({"pid": 1})])
def test_a_damaged_file_is_none(tmp_path: Path, content: str) -> None:
    (tmp_path / LIVE_FILE).write_text(content)
    assert read_live(tmp_path) is None
