"""The output of a run's processes reaches the run directory while the run goes on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from async_opd.cluster import session
from async_opd.cluster import session as ray_folder
from async_opd.cluster.session import LOGS, RayFolder


@pytest.fixture
def folder(tmp_path: Path) -> RayFolder:
    (tmp_path / "ray" / "session_latest" / "logs").mkdir(parents=True)
    return RayFolder(tmp_path)


def log_of(folder: RayFolder, name: str = "worker-1-2-3.err") -> Path:
    return folder.session / "session_latest" / "logs" / name


def test_lines_of_an_engine_are_in_the_run_directory_before_the_run_ends(
    folder: RayFolder, tmp_path: Path
) -> None:
    run_dir, log = tmp_path / "run", log_of(folder)
    run_dir.mkdir()
    log_of(folder, "gcs_server.err").write_text("Ray's own")
    log_of(folder, "worker-9.err").symlink_to(log_of(folder, "gcs_server.err"))
    for line in ("loads\n", "warms up\n", ""):
        with log.open("a") as file:
            file.write(line)
        folder.stream_logs(run_dir)
    assert (run_dir / LOGS / log.name).read_text() == "loads\nwarms up\n"
    assert list((run_dir / LOGS).iterdir()) == [run_dir / LOGS / log.name]


def test_a_streamed_log_has_a_bound_and_ends_as_the_end_of_the_log(
    folder: RayFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_folder, "LOG_BYTES", 4)
    run_dir, log = tmp_path / "run", log_of(folder)
    run_dir.mkdir()
    log.write_text("0123456789")
    folder.stream_logs(run_dir)
    folder.stream_logs(run_dir)
    assert (run_dir / LOGS / log.name).read_text() == "0123"
    folder.keep_logs(run_dir)
    assert (run_dir / LOGS / log.name).read_text() == "6789"


def test_of_more_logs_than_the_bound_the_last_written_are_kept_whatever_their_names(
    folder: RayFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_folder, "MAX_LOGS", 2)
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for age, name in enumerate(["worker-c", "worker-a", "worker-b"]):
        log_of(folder, name).write_text(name)
        os.utime(log_of(folder, name), (age, age))
        folder.stream_logs(run_dir)
    assert sorted(path.name for path in (run_dir / LOGS).iterdir()) == ["worker-a", "worker-b"]
    os.utime(log_of(folder, "worker-c"), (9, 9))
    folder.keep_logs(run_dir)
    assert sorted(path.name for path in (run_dir / LOGS).iterdir()) == ["worker-b", "worker-c"]


async def test_an_error_of_any_kind_is_printed_once_and_logs_are_streamed_again(
    folder: RayFolder, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended, calls = asyncio.Event(), list[int]()

    def stream(self: RayFolder, run_dir: Path) -> None:
        calls.append(1)
        if len(calls) == 4:
            loop.call_soon_threadsafe(ended.set)
            return
        raise ValueError("a name with a NUL")

    loop = asyncio.get_running_loop()
    monkeypatch.setattr(RayFolder, "stream_logs", stream)
    monkeypatch.setattr(session, "STREAM_S", 0.001)
    await asyncio.wait_for(session._stream_logs(folder, folder.path / "run", ended), 20)
    assert len(calls) == 4
    assert capsys.readouterr().err.count("a name with a NUL") == 1
