"""A Ray cluster for the time of a run: a local one, or an existing one to join.

A local run's Ray has a directory and a token, which are removed when the run ends:

    FOLDER/           0700: other users cannot enter it
      token           0600: a process with the token can run code in the cluster
      ray/session_*/  Ray's sockets, ports and logs, 0777 whatever the umask says

Ray trusts the files in its directory: another user with write access could choose where its
processes listen, and make them run any code.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from types import TracebackType
from typing import Any

import ray
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]
from ray.job_config import JobConfig

from async_opd.checks.resources import JOINING, refuse_client
from async_opd.cluster.actor_names import namespace
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import HeadLost, StageError
from async_opd.core.printable import indented
from async_opd.files.private_folder import private_compile_cache, temporary_folder
from async_opd.files.safe_open import make_folder, regular_file, remove_tree
from async_opd.processes.output import write_stderr
from async_opd.processes.own_settings import SAFE_PATH, starting_niceness
from async_opd.processes.reaper import ProcessReaper, process_reaper
from async_opd.waiting.waits import Waits

MESSAGES = "ray_messages.log"
"""In the run directory: what Ray says to its driver."""
STARTS = 3
"""How often a local cluster is started at most, for another reason than a slow agent."""
TOO_SLOW = "timed out during startup"
"""Text of Ray's error where its processes were too slow: it has no separate class."""
SLOW_AGENT = "Timed out waiting for file"
"""The raylet's text if its agent was too slow: the file is to hold the agent's port."""
RAYS_ASSERTION = "ray._raylet.assign_and_decrement_fut"
STREAM_S = 2.0
"""Seconds between two looks at what workers have written."""
MAX_BYTES = 107 - len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1")
"""Maximal bytes of the directory's path: the system allows 107 for a socket's."""
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
FIRST_WORKERS = "RAY_prestart_worker_first_driver"
"""Ray's setting for workers that it starts before any is asked for. Ours have another environment
than these would have."""
LOGS = "ray_logs"
"""Folder in the directory of a run."""
WORKER_LOGS = "worker-*"
"""Logs of the run's own processes: engines, stages, ranks."""
FAILED_CHECK = re.compile(r"Check failed: (?:\S*\(\) )?(.+)")
"""A raylet's error; an expression of C++ in front of its words is left out."""
NOT_OF_A_NAME = re.compile(r"[^\w:.-]")
LAST_LINES_S = 2.0
"""Seconds in which Ray sends the last lines of a process of another node."""
LOG_BYTES = 1 << 20
MAX_LOGS = 200


@dataclass(frozen=True)
class RayFolder:
    """A directory (0700) for Ray and its token."""

    path: Path

    @property
    def session(self) -> Path:
        """Ray's temporary directory, which Ray opens to all users that can enter ``path``."""
        return self.path / "ray"

    @property
    def _logs(self) -> Path:
        return self.session / "session_latest" / "logs"

    @property
    def token(self) -> Path:
        """A file with the token."""
        return self.path / "token"

    def keep_logs(self, run_dir: Path, pattern: str = "*") -> None:
        """Copies the end of each of Ray's logs of these names into the run directory.

        Raises OSError.
        """
        target = run_dir / LOGS
        remove_tree(target)
        make_folder(target)
        for log in self._newest(pattern):
            with suppress(OSError), open(log, "rb", opener=regular_file) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
                with open(target / log.name, "wb", opener=regular_file) as copy:
                    copy.write(file.read(LOG_BYTES))

    def stream_logs(self, run_dir: Path) -> None:
        """Appends to the copies of the workers' logs what these have written since, up to a bound.

        Copies of older logs than the MAX_LOGS newest are removed, those of an earlier part too.
        The copies are in the run directory, to inspect a live run; ``keep_logs`` replaces
        them by the ends of the logs. Raises OSError.
        """
        target = run_dir / LOGS
        make_folder(target)
        newest = self._newest(WORKER_LOGS)
        for copied_log in set(target.iterdir()) - {target / log.name for log in newest}:
            copied_log.unlink()
        for log in newest:
            with (
                suppress(OSError),
                open(log, "rb", opener=regular_file) as file,
                open(target / log.name, "ab", opener=regular_file) as copy,
            ):
                file.seek(copied := copy.tell())
                copy.write(file.read(max(LOG_BYTES - copied, 0)))

    def raylet_error(self) -> str:
        """Why the raylet ended, in the words of its log; empty if it has none."""
        log = self._logs / "raylet.err"
        with suppress(OSError), open(log, errors="replace", opener=regular_file) as file:
            for line in file.read(LOG_BYTES).splitlines():
                if found := FAILED_CHECK.search(line):
                    return found[1].strip()
        return ""

    def _newest(self, pattern: str) -> list[Path]:
        """The logs that were written to last, MAX_LOGS at most."""
        times = list[tuple[float, Path]]()
        for log in self._logs.glob(pattern):
            with suppress(OSError):  # a link to nothing
                times.append((log.stat(follow_symlinks=False).st_mtime, log))
        return [log for _, log in sorted(times)[-MAX_LOGS:]]


@contextmanager
def ray_folder() -> Iterator[RayFolder]:
    """A folder for the time of a local cluster; environment variables give its token's path.

    StageError if no directory is private and has a short path.
    """
    try:
        folder = RayFolder(temporary_folder("opd_", MAX_BYTES))
    except OSError as error:
        remedy = "RAY_TMPDIR names a directory with a short path that others cannot replace"
        raise StageError("cluster", str(error), remedy) from error
    try:
        with open(folder.token, "w", opener=regular_file) as file:
            file.write(secrets.token_hex(32))
        with environment({TOKEN: None, TOKEN_PATH: str(folder.token)}):
            AuthenticationTokenLoader.instance().reset_cache()
            yield folder
    finally:
        AuthenticationTokenLoader.instance().reset_cache()
        remove_tree(folder.path)


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets variables, or removes those with None, for this process and its new child processes."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value


def joining(config: RunConfig) -> RunConfig:
    """The config with the address of the cluster that it joins, also where RAY_ADDRESS names it.

    ConfigError if RAY_ADDRESS names no node of one.
    """
    refuse_client(config)
    cluster = config.cluster.model_copy(update={"address": config.cluster.joins})
    return config.model_copy(update={"cluster": cluster})


@contextmanager
def without_rays_assertion() -> Iterator[None]:
    """Leaves out an assertion of Ray's own code that it prints to stderr, twice, without effect.

    The first time has no traceback, which every error of Python code has.
    """
    raised, ignored = sys.excepthook, sys.unraisablehook

    def unless_bare(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        if kind is not AssertionError or trace is not None:
            raised(kind, error, trace)

    def unless_rays(found: sys.UnraisableHookArgs) -> None:
        if found.object != RAYS_ASSERTION:
            ignored(found)

    sys.excepthook, sys.unraisablehook = unless_bare, unless_rays
    try:
        yield
    finally:
        sys.excepthook, sys.unraisablehook = raised, ignored


@asynccontextmanager
async def ray_session(
    config: RunConfig, notify: Callable[[str], None], waits: Waits | None = None
) -> AsyncIterator[ProcessReaper | None]:
    """Starts or joins the cluster; at the end, shuts down the processes that the run started in it.

    ``notify`` gets a line for each further start of a local cluster.

    A process reaper kills the processes of a local cluster. Its caller tracks Ray's head and agents
    once all of them have started. The cluster has its own directory and token: ``RayFolder``.

    Processes that Ray starts do not import from the working directory by default.

    Ray's token authentication stays as it is (on by default).
    """
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    private_compile_cache()
    waits = waits or Waits(lambda line: None)
    with ExitStack() as stack:
        stack.enter_context(without_rays_assertion())
        stack.enter_context(environment({SAFE_PATH: "1"}))
        with waits.on("Ray", config.timeouts.engine_start_s):
            folder, ours = await _started(config, stack, notify)
        lost = False
        try:
            async with _logs_kept(config, folder, of_workers=True):
                yield ours
        except HeadLost:
            lost = True
            raise
        finally:
            left = not lost and await _shut_down(config.timeouts.shutdown_s, waits)
            if not left and ours is not None:  # a joined cluster ends the run's processes itself
                await asyncio.to_thread(ours.kill_all)


async def _shut_down(bound_s: float, waits: Waits) -> bool:
    """Leaves the cluster; False if Ray does not end within the bound."""
    try:
        with waits.on("Ray to end", bound_s):
            async with asyncio.timeout(bound_s):
                await _in_a_daemon(ray.shutdown)
    except TimeoutError:
        return False
    return True


async def _started(
    config: RunConfig, stack: ExitStack, notify: Callable[[str], None]
) -> tuple[RayFolder | None, ProcessReaper | None]:
    """Starts or joins the cluster; ``stack`` gets what has to be left at its end.

    A local cluster that is too slow is started anew. Its raylet waits 15 s for its agent, which no
    setting changes (ray-project/ray issue 65983); an overloaded machine can be too slow for that
    during minutes, so that such starts go on while one more fits into ``engine_start_s``.
    """
    address = config.cluster.address or "local"
    if address != "local":
        async with _logs_kept(config, None):
            await _start(config, address, None)
        return None, None
    first, starts = monotonic(), 0
    while True:
        begun, starts = monotonic(), starts + 1
        with ExitStack() as attempt:
            attempt.enter_context(environment({**starting_niceness(), FIRST_WORKERS: "0"}))
            folder = attempt.enter_context(ray_folder())
            ours = attempt.enter_context(process_reaper(folder.path))
            try:
                async with _logs_kept(config, folder):
                    await _start(config, address, folder)
            except _TooSlow as error:
                await asyncio.to_thread(ours.kill_all)
                now = monotonic()
                fits = now - first + (now - begun) < config.timeouts.engine_start_s
                if not (fits if SLOW_AGENT in error.cause else starts < STARTS):
                    raise
                notify(f"Ray is started again: {error.cause}: is the machine overloaded?")
            else:
                stack.push(attempt.pop_all())
                return folder, ours


class _TooSlow(StageError):
    """Ray's processes have not started in the time that they give each other."""


@asynccontextmanager
async def _logs_kept(
    config: RunConfig, folder: RayFolder | None, of_workers: bool = False
) -> AsyncIterator[None]:
    """Copies the end of each of Ray's logs into the directory of a run that fails.

    ``of_workers``: what engines and other processes of the run have written, however it ends, and
    its beginning while the run goes on.
    """
    kept, ended = WORKER_LOGS if of_workers else "", asyncio.Event()
    streaming: asyncio.Task[None] | None = None
    if of_workers and folder is not None and config.run_dir is not None:
        streaming = asyncio.create_task(_stream_logs(folder, Path(config.run_dir), ended))
    try:
        yield
    except Exception as error:
        kept = "*"
        if of_workers and folder is None and not isinstance(error, HeadLost):
            await asyncio.sleep(LAST_LINES_S)
        raise
    finally:
        if streaming is not None:
            ended.set()
            await asyncio.wait({streaming}, timeout=config.timeouts.shutdown_s)
            streaming.cancel()  # the run's disk hangs
        if kept and folder is not None and config.run_dir is not None:
            with suppress(OSError):  # the run's own error is the one to raise
                await asyncio.to_thread(folder.keep_logs, Path(config.run_dir), kept)


async def _stream_logs(folder: RayFolder, run_dir: Path, ended: asyncio.Event) -> None:
    """Copies what workers write, until the run has ended; failed copies are tried again.

    Each new error is printed once.
    """
    printed = ""
    while not ended.is_set():
        try:
            await asyncio.to_thread(folder.stream_logs, run_dir)
        except Exception as error:  # of any kind: the run goes on
            if repr(error) != printed:
                printed = repr(error)
                write_stderr(indented(f"ray_logs/ does not have what workers write now: {printed}"))
        with suppress(TimeoutError):
            async with asyncio.timeout(STREAM_S):
                await ended.wait()


class _JobConfig(JobConfig):
    """A config of which Ray assumes that it sets the workers' import path.

    For any other, Ray adds the working directory to the path: a module of a downloaded folder could
    then replace one of async_opd or of a library.
    """

    def _runtime_env_has_working_dir(self) -> bool:
        return True


def job_config() -> JobConfig:
    """Workers import from the script's folder and the working directory only if the driver does.

    They inherit ``PYTHONPATH`` and the installed packages.
    """
    script, here = os.path.dirname(os.path.realpath(sys.argv[0])), os.getcwd()
    paths = [path for path in dict.fromkeys((script, here)) if path in sys.path]
    return _JobConfig(_py_driver_sys_path=paths)


async def _start(config: RunConfig, address: str, folder: RayFolder | None) -> None:
    logging.getLogger("ray").setLevel(logging.ERROR)  # its hints are not about the run
    ray._private.worker.print_to_stdstream = partial(_keep_message, config.run_dir)
    joins = address != "local"
    try:
        async with asyncio.timeout(config.timeouts.engine_start_s):
            await _in_a_daemon(
                partial(
                    ray.init,
                    address=address,
                    namespace=namespace(config),
                    job_config=job_config(),
                    runtime_env=config.cluster.runtime_env or None,
                    include_dashboard=None if joins else False,
                    log_to_driver=joins and config.run_dir is not None,
                    configure_logging=False,
                    _temp_dir=str(folder.session) if folder else None,
                )
            )
    except Exception as error:
        if TOO_SLOW in str(error):
            logged = folder.raylet_error() if folder is not None else ""
            cause = f"Ray's processes did not start in time ({logged or error})"
            raise _TooSlow("cluster", cause, "is the machine overloaded? See ray_logs/") from error
        own = bool(config.cluster.runtime_env)
        if isinstance(error, ValueError) or (own and isinstance(error, TypeError)):
            remedy = "leave what it names out of the runtime_env of the job"
            if own:
                remedy = "correct cluster.runtime_env; a job that has one may not name the same"
            raise StageError("cluster", f"Ray refuses {address!r}: {error}", remedy) from error
        if not isinstance(error, (ConnectionError, RuntimeError, TimeoutError)):
            raise
        raise StageError(
            "cluster",
            f"no Ray cluster at {address!r}: {type(error).__name__}: {error}",
            JOINING,
        ) from error


def _keep_message(run_dir: str | None, message: dict[str, Any], ignore_prefix: bool) -> None:
    """Writes what Ray would print to files of the run directory; without one it is not kept.

    Of a crashed process, which ``run.log`` names, into MESSAGES; in a joined cluster also what the
    run's processes on all nodes write, into LOGS. Ray's words about the cluster are left out.
    """
    with suppress(OSError):
        if run_dir is None:
            return
        if "job" not in message:
            with open(Path(run_dir) / MESSAGES, "a", opener=regular_file) as file:
                file.writelines(f"{line}\n" for line in message["lines"])
        elif message["job"]:
            append_to_log(Path(run_dir) / LOGS, message)


def append_to_log(logs: Path, message: Mapping[str, Any]) -> None:
    """Appends lines of a process on a node to ``NODE/worker-PID.err`` or ``.out``. Raises OSError.

    A file has between one and two times LOG_BYTES at its end, the older ones as ``….1``; a node's
    folder MAX_LOGS files, those written to last.
    """
    node, pid = (NOT_OF_A_NAME.sub("_", str(message[key])) for key in ("ip", "pid"))
    log = logs / f"node-{node}" / f"worker-{pid}.{'err' if message['is_err'] else 'out'}"
    make_folder(log.parent)
    if not log.exists():
        kept = sorted(log.parent.iterdir(), key=lambda one: one.lstat().st_mtime)
        for older in kept[: max(len(kept) - MAX_LOGS + 1, 0)]:
            older.unlink()
    elif log.lstat().st_size > LOG_BYTES:
        log.replace(f"{log}.1")
    with open(log, "a", opener=regular_file, encoding="utf-8", errors="backslashreplace") as file:
        file.writelines(f"{line}\n" for line in message["lines"])


async def _in_a_daemon(work: Callable[[], object]) -> None:
    """Waits for a blocking call in a daemon thread, which does not delay the process's exit.

    The thread outlives the call: processes that Ray started die with the thread that started them.
    """
    loop, done = asyncio.get_running_loop(), asyncio.Event()
    errors: list[BaseException] = []

    def body() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)
        with suppress(RuntimeError):  # the wait was cancelled, and its loop closed
            loop.call_soon_threadsafe(done.set)
        Event().wait()

    Thread(target=body, name="ray", daemon=True).start()
    await done.wait()
    if errors:
        raise errors[0]
