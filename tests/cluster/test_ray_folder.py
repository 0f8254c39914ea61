"""The output of a run's processes reaches the run directory while the run goes on."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from async_opd.cluster import session
from async_opd.cluster import session as ray_folder
from async_opd.cluster.session import LOGS, MESSAGES, RayFolder, _keep_message, append_to_log


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


def of_node(**changed: object) -> dict[str, Any]:
    """A message of Ray with lines of a process."""
    message = {"ip": "10.0.0.3", "pid": "77", "job": "01", "is_err": True, "lines": ["a", "b"]}
    return message | changed


def test_lines_of_a_process_on_a_node_are_in_a_file_of_it_in_the_nodes_folder(
    tmp_path: Path,
) -> None:
    for message in (of_node(), of_node(lines=["c"]), of_node(is_err=False, lines=["out"])):
        _keep_message(str(tmp_path), message, False)
    node = tmp_path / LOGS / "node-10.0.0.3"
    assert (node / "worker-77.err").read_text() == "a\nb\nc\n"
    assert (node / "worker-77.out").read_text() == "out\n"


def test_of_ray_only_the_words_about_processes_of_the_run_are_kept(tmp_path: Path) -> None:
    _keep_message(str(tmp_path), of_node(job="", pid="autoscaler"), False)
    _keep_message(None, of_node(), False)
    assert list(tmp_path.iterdir()) == []
    _keep_message(str(tmp_path), {"lines": ["a worker died"], "pid": "raylet"}, False)
    assert (tmp_path / MESSAGES).read_text() == "a worker died\n"


def test_logs_of_a_node_have_bounds_and_keep_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "LOG_BYTES", 4)
    monkeypatch.setattr(session, "MAX_LOGS", 2)
    for line in ("one", "two", "three", "four"):
        append_to_log(tmp_path, of_node(lines=[line]))
    node = tmp_path / "node-10.0.0.3"
    assert (node / "worker-77.err.1").read_text() == "three\n"
    assert (node / "worker-77.err").read_text() == "four\n"
    os.utime(node / "worker-77.err.1", (1, 1))
    append_to_log(tmp_path, of_node(pid="78"))
    assert {one.name for one in node.iterdir()} == {"worker-77.err", "worker-78.err"}


def test_no_words_of_a_process_lead_out_of_the_folder(tmp_path: Path) -> None:
    append_to_log(tmp_path / "logs", of_node(ip="../..", pid="../../x"))
    (node,) = (tmp_path / "logs").iterdir()
    assert node.name == "node-.._.."
    (tmp_path / "private").write_text("")
    (node / "worker-1.err").symlink_to(tmp_path / "private")
    with pytest.raises(OSError, match="link"):
        append_to_log(tmp_path / "logs", of_node(ip="../..", pid="1"))
