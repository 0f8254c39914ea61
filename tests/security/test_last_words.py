"""Ray's logs of a cluster that was joined: others can put there what they like."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from async_opd.cluster import remote as host
from async_opd.cluster.actor_shell import ActorPlacement
from async_opd.cluster.faults import last_error_lines
from async_opd.cluster.remote import Remote
from async_opd.core.errors import EngineStartError, StageError
from async_opd.processes.last_lines import LOG_BYTES, MAX_LINE_CHARACTERS

PROCESS = "0a" * 28
NAME = f"worker-{PROCESS}-01000000-77"


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "logs"
    folder.mkdir()
    node = SimpleNamespace(get_logs_dir_path=lambda: str(folder))
    monkeypatch.setattr(ray._private.worker, "_global_node", node)
    return folder


def test_the_last_errors_of_a_process_are_quoted(logs: Path) -> None:
    (logs / f"{NAME}.err").write_text("all is well\nMemoryError: none left\n")
    assert last_error_lines(PROCESS) == "      MemoryError: none left"


def test_words_of_a_process_with_the_same_pid_are_not_its_own(logs: Path) -> None:
    """As that of another machine, or of an earlier job."""
    (logs / f"worker-{'0b' * 28}-01000000-77.err").write_text("an error of another process\n")
    assert last_error_lines(PROCESS) == ""


@pytest.mark.parametrize(
    "warning",
    [
        "W1123 08:11:20.539000 4518 torch/utils/_pytree.py:630] will be an error in a release",
        "\x1b[33m(EngineCore pid=7) WARNING 11-23 08:00:37 [x.py:1] no error yet",
        "x.py:365: DeprecationWarning: an error in a later version",
    ],
)
def test_a_warning_about_errors_is_no_last_word(logs: Path, warning: str) -> None:
    (logs / f"{NAME}.err").write_text(f"MemoryError: none left\n{warning}\n")
    assert last_error_lines(PROCESS) == "      MemoryError: none left"


def test_a_link_is_not_followed(logs: Path, tmp_path: Path) -> None:
    (tmp_path / "private").write_text("the error password\n")
    (logs / f"{NAME}.err").symlink_to(tmp_path / "private")
    assert "is a symbolic link" in last_error_lines(PROCESS)
    assert "password" not in last_error_lines(PROCESS)


def test_a_pipe_is_not_waited_for(logs: Path) -> None:
    os.mkfifo(logs / f"{NAME}.err")
    (logs / f"{NAME}.out").write_text("error: of its own\n")
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(last_error_lines(PROCESS)), daemon=True)
    thread.start()
    thread.join(10)
    assert "is not a regular file" in found[0]
    assert found[0].endswith("error: of its own")


def test_of_a_log_without_end_the_end_is_read(logs: Path) -> None:
    with open(logs / f"{NAME}.err", "wb") as file:
        file.write(b"error at the start\n")
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nerror at the end\n")
    assert last_error_lines(PROCESS) == "      error at the end"


def test_of_a_line_without_end_the_start_is_shown(logs: Path) -> None:
    (logs / f"{NAME}.err").write_text("error " + "x" * (LOG_BYTES // 2))
    assert len(last_error_lines(PROCESS)) < MAX_LINE_CHARACTERS + 10


async def test_the_event_loop_does_not_wait_for_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def read(process: str) -> str:
        threads.append(threading.get_ident())
        return "its own error"

    async def bounded(*_: Any) -> ActorPlacement:
        if breaks.pop():
            raise StageError("x", "broke")
        return ActorPlacement("node", (), PROCESS)

    breaks = [True, False]
    monkeypatch.setattr(host, "last_error_lines", read)
    method = SimpleNamespace(remote=str)
    remote = Remote("x", SimpleNamespace(place=method, build=method), 1)
    monkeypatch.setattr(remote, "_bounded", bounded)
    with pytest.raises(EngineStartError, match="did not start: broke"):
        await asyncio.wait_for(remote.build("a:b", (), 1), 5)
    assert threads != [threading.get_ident()]
    assert len(threads) == 1
