"""Other users of the machine cannot write where a local run's processes read."""

from __future__ import annotations

import asyncio
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_opd.cluster.session import MAX_BYTES, environment, ray_folder, ray_session
from async_opd.config.load import load_config
from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.errors import StageError
from async_opd.files.private_folder import (
    COMPILE_CACHE,
    exposed,
    private_compile_cache,
    temporary_folder,
)
from async_opd.grading.grader_pool import GraderSpec
from async_opd.processes.reaper import process_reaper
from tests.processes.test_signals import is_gone

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of ``ray.init``, with the variables that a child would see."""
    import ray

    calls: list[dict[str, Any]] = []

    def init(**arguments: Any) -> None:
        calls.append({**arguments, "environ": dict(os.environ)})

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    return calls


def session(
    *overrides: str,
    error: Exception | None = None,
    line: str = "",
    log: str = "gcs_server.err",
) -> None:
    async def body() -> None:
        async with ray_session(load_config(EXAMPLE, list(overrides)), print) as ours:
            if line and ours is not None:
                temporary = Path(os.environ["RAY_AUTH_TOKEN_PATH"]).parent / "ray"
                logs = temporary / "session_latest" / "logs"
                logs.mkdir(parents=True)
                (logs / log).write_text(line)
                (logs / "worker-x.err").symlink_to(EXAMPLE)
                os.mkfifo(logs / "worker-y.err")
            if error is not None:
                raise error

    asyncio.run(body())


class TestTheRayOfALocalRun:
    def test_works_below_a_directory_that_only_its_user_gets_into(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        import ray

        seen: list[tuple[int, bool]] = []

        def init(_temp_dir: str, **_: Any) -> None:
            above = Path(_temp_dir).parent
            seen.append((mode(above), above.stat().st_uid == os.getuid()))

        monkeypatch.setattr(ray, "init", init)
        monkeypatch.setattr(ray, "shutdown", lambda: None)
        session()
        assert seen == [(0o700, True)]

    def test_leaves_no_directory(self, started: list[dict[str, Any]]) -> None:
        session()
        assert not Path(started[0]["_temp_dir"]).parent.exists()

    def test_has_a_token_of_its_own_in_a_private_file(self) -> None:
        tokens = []
        for _ in range(2):
            with ray_folder() as folder:
                assert mode(folder.token) == 0o600
                tokens.append(folder.token.read_text())
        assert len(set(tokens)) == 2
        assert min(map(len, tokens)) == 64

    def test_takes_no_other_token(
        self, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
        session()
        assert "RAY_AUTH_TOKEN" not in started[0]["environ"]
        assert os.environ["RAY_AUTH_TOKEN"] == "of another cluster"
        assert "RAY_AUTH_TOKEN_PATH" not in os.environ

    def test_a_joined_cluster_keeps_its_token_and_directory(
        self, started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("RAY_AUTH_TOKEN", "of another cluster")
        session("cluster.address=10.0.0.1:6379")
        assert started[0]["_temp_dir"] is None
        assert started[0]["environ"]["RAY_AUTH_TOKEN"] == "of another cluster"

    def test_leaves_its_logs_in_the_directory_of_a_run_that_fails(
        self, started: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        with pytest.raises(StageError, match="broke"):
            session(f"run_dir={tmp_path}", error=StageError("trainer", "broke"), line="died")
        kept = tmp_path / "ray_logs"
        assert [log.name for log in kept.iterdir()] == ["gcs_server.err"]
        assert (kept / "gcs_server.err").read_text() == "died"
        assert (mode(kept), mode(kept / "gcs_server.err")) == (0o700, 0o600)

    def test_leaves_what_its_processes_wrote_in_the_directory_of_a_run_that_completes(
        self, started: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        session(f"run_dir={tmp_path}", line="died", log="worker-1-2-3.err")
        kept = tmp_path / "ray_logs"
        assert (kept / "worker-1-2-3.err").read_text() == "died"
        assert (mode(kept), mode(kept / "worker-1-2-3.err")) == (0o700, 0o600)

    def test_leaves_no_log_of_ray_itself_in_the_directory_of_a_run_that_completes(
        self, started: list[dict[str, Any]], tmp_path: Path
    ) -> None:
        session(f"run_dir={tmp_path}", line="all is well")
        assert not list((tmp_path / "ray_logs").iterdir())

    def test_without_a_place_the_error_says_why(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "none"))
        with pytest.raises(StageError, match=r"No such file or directory\n.*RAY_TMPDIR"):
            session()

    def test_is_no_place_that_a_grader_gets(self) -> None:
        with environment({"RAY_AUTH_TOKEN_PATH": "/token"}):
            assert "RAY_AUTH_TOKEN_PATH" not in GraderSpec("exact", GradingConfig(), 1).environ()


class TestATemporaryFolder:
    def test_is_not_made_where_others_can_rename_it(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        tmp_path.chmod(0o777)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        with pytest.raises(OSError, match="others can write in"):
            temporary_folder("x_", 500)
        assert list(tmp_path.iterdir()) == []

    def test_is_made_where_others_cannot_rename_what_is_not_theirs(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        tmp_path.chmod(0o1777)
        monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
        assert mode(temporary_folder("x_", 500)) == 0o700

    def test_has_a_path_that_is_short_enough(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        long = tmp_path / ("x" * 100)
        long.mkdir()
        monkeypatch.setattr("tempfile.gettempdir", lambda: str(long))
        folder = temporary_folder("x_", MAX_BYTES)
        folder.rmdir()
        assert folder.parent == Path(os.path.realpath("/tmp"))

    def test_what_everybody_can_write_in_is_exposed_sticky_or_not(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o1777)
        assert exposed(tmp_path) == f"others can write in {tmp_path}"


KILLED = """
import sys, tempfile, time
from pathlib import Path
from async_opd.processes.reaper import process_reaper

with process_reaper(Path(sys.argv[1])):
    print("there", flush=True)
    time.sleep(60)
"""


def test_the_directory_of_a_run_that_is_killed_goes_too(tmp_path: Path) -> None:
    folder = tmp_path / "a folder"
    (folder / "inner").mkdir(parents=True)
    command = [sys.executable, "-c", KILLED, str(folder)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    first.stdout.readline()
    watcher = _child(first.pid)
    first.kill()
    first.wait(30)
    assert is_gone(watcher)
    assert not folder.exists()


def _child(pid: int) -> int:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return int(text.split()[0])


def test_a_family_that_is_left_leaves_the_directory(tmp_path: Path) -> None:
    with process_reaper(tmp_path):
        pass
    assert tmp_path.exists()


class TestTheCompilersCache:
    @pytest.fixture(autouse=True)
    def home(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        monkeypatch.setenv(COMPILE_CACHE, "")
        monkeypatch.delenv(COMPILE_CACHE)
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path))
        return tmp_path

    def test_is_the_users_own(self, home: Path) -> None:
        private_compile_cache()
        folder = Path(os.environ[COMPILE_CACHE])
        assert folder == home / ".cache" / "async_opd" / "torchinductor"
        assert mode(folder) == 0o700

    @pytest.mark.slow
    def test_is_the_one_that_torch_takes(self) -> None:
        private_compile_cache()
        told = "from torch._inductor.runtime import cache_dir_utils as c; print(c.cache_dir())"
        found = subprocess.run(
            [sys.executable, "-c", told], capture_output=True, text=True, timeout=120
        )
        assert found.stdout.strip() == os.environ[COMPILE_CACHE], found.stderr

    def test_stays_what_the_environment_says(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv(COMPILE_CACHE, "/elsewhere")
        private_compile_cache()
        assert os.environ[COMPILE_CACHE] == "/elsewhere"

    @pytest.mark.parametrize("where", ["", ".cache", ".cache/async_opd/torchinductor"])
    def test_is_a_temporary_one_where_others_can_write(self, home: Path, where: str) -> None:
        (home / ".cache/async_opd/torchinductor").mkdir(parents=True, mode=0o700)
        (home / where).chmod(0o777)
        private_compile_cache()
        folder = Path(os.environ[COMPILE_CACHE])
        assert home not in folder.parents
        assert mode(folder) == 0o700

    def test_is_a_temporary_one_where_there_is_no_home(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HOME", "/dev/null")
        private_compile_cache()
        assert mode(Path(os.environ[COMPILE_CACHE])) == 0o700

    def test_is_named_to_every_process_of_a_run(self, started: list[dict[str, Any]]) -> None:
        session()
        assert COMPILE_CACHE in started[0]["environ"]

    def test_is_named_by_an_actor_of_a_joined_cluster_itself(self) -> None:
        from async_opd.cluster.actor_shell import ActorShell

        umask = os.umask(0o077)
        try:
            ActorShell()
        finally:
            os.umask(umask)
        assert COMPILE_CACHE in os.environ
