"""A local Ray cluster in a working directory that is not to be trusted."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import ray

from async_opd.cluster.remote import Remote
from async_opd.cluster.session import MESSAGES, RAYS_ASSERTION, ray_session, without_rays_assertion
from async_opd.config.load import load_config

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "quickstart.yaml"
FEW_TRIES = {"RAY_NUM_REDIS_GET_RETRIES": "3"}
"""Ray shows a token that is refused 20 times, a second apart."""


class Process:
    """Tells of the process that it is in."""

    async def tell(self) -> tuple[list[str], str, dict[str, str]]:
        return sys.path, os.getcwd(), dict(os.environ)


CRASH = "A worker died or was killed"


@dataclass
class Ray:
    """What the Ray of a local run is like: ``mode`` of the directory above all of it."""

    session: Path
    mode: int
    token: str
    commands: list[str]
    accepted: dict[str, bool]

    @classmethod
    def now(cls) -> Ray:
        node = ray._private.worker._global_node
        session = Path(node.get_session_dir_path())
        token = (session.parents[1] / "token").read_text()
        commands = []
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):  # it has ended; a zombie has no command line
                commands.append("\0".join(process.cmdline()))
        tokens = (token, "0" * 64)
        with ThreadPoolExecutor() as threads:
            found = threads.map(partial(accepts, node.gcs_address), tokens)
        accepted = dict(zip(tokens, found, strict=True))
        return cls(session, session.parents[1].stat().st_mode & 0o777, token, commands, accepted)


def accepts(address: str, token: str) -> bool:
    """Whether Ray's head answers who shows a token, with a process of its own."""
    program = "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False)"
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token, **FEW_TRIES}
    command = [sys.executable, "-c", program, address]
    return subprocess.run(command, env=env, capture_output=True, timeout=120).returncode == 0


@dataclass
class Seen:
    ray: Ray
    folder: Path
    path: list[str]
    directory: str
    environment: dict[str, str]
    said: str = ""
    messages: str = ""


@contextmanager
def terminal(path: Path) -> Iterator[None]:
    """What this process would write to its terminal goes to a file."""
    saved = os.dup(2)
    with path.open("w", buffering=1) as file, pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "stderr", file)
        patched.setattr(sys, "stdout", file)
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(saved, 2)
            os.close(saved)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """What an actor finds, started in a folder whose modules say that they ran."""
    run_dir = tmp_path_factory.mktemp("run")
    config = load_config(EXAMPLE).model_copy(update={"run_dir": str(run_dir)})
    folder = tmp_path_factory.mktemp("downloaded")
    for name in ("pydantic", "numpy", "aiohttp", "psutil", "async_opd"):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")

    notes = list[str]()

    async def told() -> Seen:
        async with ray_session(config, notes.append):
            remote = Remote.create("process", timeout_s=300)
            await remote.build(f"{__name__}:Process", (), 300)
            found: tuple[list[str], str, dict[str, str]] = await remote.call("tell")
            seen = Seen(await asyncio.to_thread(Ray.now), folder, *found)
            os.kill(await remote.pid(300), signal.SIGKILL)
            async with asyncio.timeout(300):
                while CRASH not in seen.messages:
                    await asyncio.sleep(0.1)
                    if (messages := run_dir / MESSAGES).exists():
                        seen = replace(seen, messages=messages.read_text())
            return seen

    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setenv("PYTHONPATH", str(ROOT))
        patched.setattr(sys, "path", [path for path in sys.path if path])
        said = tmp_path_factory.mktemp("terminal") / "said"
        with terminal(said):
            found = asyncio.run(told())
        assert [note for note in notes if "Ray is started again" not in note] == []
        return replace(found, said=said.read_text())


def test_ray_writes_about_a_crash_into_the_run_directory_only(seen: Seen) -> None:
    assert (seen.said, CRASH in seen.messages) == ("", True)


def test_an_actor_and_its_children_import_nothing_from_the_working_directory(seen: Seen) -> None:
    assert seen.directory == str(seen.folder)
    assert str(seen.folder) not in map(os.path.realpath, seen.path)
    assert not (seen.folder / "ran").exists()
    assert seen.environment["PYTHONSAFEPATH"] == "1"


def test_rays_directory_is_private_and_goes_with_the_cluster(seen: Seen) -> None:
    assert seen.ray.session.parent.name == "ray"
    assert seen.ray.mode == 0o700
    assert not seen.ray.session.parents[1].exists()


def test_the_token_of_a_local_cluster_is_asked_for_and_is_on_no_command_line(seen: Seen) -> None:
    assert seen.ray.accepted == {seen.ray.token: True, "0" * 64: False}
    assert any("gcs_server" in line for line in seen.ray.commands)
    assert not [line for line in seen.ray.commands if seen.ray.token in line]


def test_rays_assertion_is_not_printed_and_other_errors_are(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The arguments are those of an `async_opd eval` with Ray 2.60."""
    shown: list[object] = []
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: shown.append(error))
    monkeypatch.setattr(sys, "unraisablehook", lambda found: shown.append(found.object))
    before = sys.excepthook, sys.unraisablehook
    mine = ValueError("mine")
    with without_rays_assertion():
        for error in (AssertionError(), mine):
            sys.excepthook(type(error), error, None)
        for name in (RAYS_ASSERTION, "other"):
            sys.unraisablehook(SimpleNamespace(object=name))
    assert shown == [mine, "other"]
    assert (sys.excepthook, sys.unraisablehook) == before
