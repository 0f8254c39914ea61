"""The one Ray actor shell: it builds a plain object in its own process and calls its methods.

    driver ── build("module:callable", args) ──► ActorShell ── call("method", args) ──► object

Only ``Remote`` calls an ActorShell; the typed proxies of ``async_opd.cluster.proxies`` use it.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from types import ModuleType
from typing import Any, cast

import ray

from async_opd.cluster.faults import last_error_lines, to_stage_error
from async_opd.cluster.network import own_address
from async_opd.config.sections.cluster import ClusterConfig
from async_opd.core.errors import (
    EngineStartError,
    ProcessDied,
    ProcessRestarts,
    StageError,
    StageTimeout,
    first_cause,
)
from async_opd.files.private_folder import private_compile_cache
from async_opd.files.safe_open import PRIVATE_UMASK
from async_opd.processes.listening import listening_socket
from async_opd.processes.loop_lag import LoopLag
from async_opd.processes.parent_death import SAFE_PATH
from async_opd.waiting.deadline import Deadline

START_KEY, REQUEST_KEY, LIVENESS_KEY = (
    "timeouts.engine_start_s",
    "timeouts.request_s",
    "supervision.timeout_s",
)
"""Config keys of bounds, for remedies."""
RETRY_S = 0.05
"""Seconds before a call is repeated whose process died."""


@dataclass(frozen=True)
class ActorPlacement:
    """The node and the GPUs of a process, for other processes to share."""

    node: str
    gpus: tuple[str, ...]

    def __str__(self) -> str:
        return f"GPU {', '.join(self.gpus) or '–'} of node {self.node}"


ACTOR = "ASYNC_OPD_ACTOR"
LEAVE_GPUS_ALONE = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Without it Ray hides all GPUs from a process that reserves none."""


def _imported(module: str) -> ModuleType:
    """Imports without garbage collection, which finds nothing and takes a quarter of the time.

    vLLM and its imports take 4.8 s of processor time instead of 6.4.
    """
    gc.disable()
    try:
        return importlib.import_module(module)
    finally:
        gc.enable()


class ActorShell:
    """The object in an actor's process. Ray runs it on uvloop; calls are concurrent."""

    def __init__(self) -> None:
        os.umask(PRIVATE_UMASK)  # a joined cluster may have another
        private_compile_cache()
        name = os.environ.get(ACTOR, "")
        print(f"async_opd: this is the log of {name}", file=sys.stderr, flush=True)
        self._object: Any = None
        self._built = asyncio.Event()
        self._lag: LoopLag | None = None

    async def pid(self) -> int:
        """The actor's process id."""
        return os.getpid()

    async def is_built(self) -> bool:
        """Whether the object is built."""
        return self._built.is_set()

    async def lag(self) -> float:
        """Longest delay of its event loop since the last call, in seconds; 0 at the first call."""
        self._lag = self._lag or LoopLag()
        return self._lag.drain()

    async def block_forever(self) -> None:
        """Never returns: its caller gets an error when the process ends."""
        await asyncio.Event().wait()

    async def place(self) -> ActorPlacement:
        """The node and the GPUs of the process."""
        context = ray.get_runtime_context()
        gpus = context.get_accelerator_ids().get("GPU", [])
        return ActorPlacement(context.get_node_id(), tuple(map(str, gpus)))

    async def listen(self, cluster: ClusterConfig) -> tuple[str, int, int]:
        """Opens a socket for the object to build: its address, port and file descriptor."""
        address = own_address(cluster)
        listener = listening_socket(address, cluster.port_range)
        return address, int(listener.getsockname()[1]), listener.detach()

    async def build(self, factory: str, args: tuple[Any, ...]) -> None:
        """Builds the object: imports ``module:callable``, calls it, and awaits a coroutine."""
        module, _, name = factory.partition(":")
        made = getattr(_imported(module), name)(*args)
        self._object = await made if inspect.isawaitable(made) else made
        self._built.set()

    async def call(self, method: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Awaits a method of the object, after ``build`` in a process that was restarted."""
        await self._built.wait()
        try:
            return await getattr(self._object, method)(*args, **named)
        except ExceptionGroup as group:
            raise first_cause(group) from group


@cache
def _shell(kind: str) -> Any:
    """The Ray actor class of an ActorShell that Ray shows as a ``kind``."""
    return ray.remote(type(kind, (ActorShell,), {}))


class Remote:
    """A handle of a named ActorShell. It can be pickled and sent to other actors.

    Every call translates Ray's errors (``async_opd.cluster.faults``) and has a timeout.
    """

    def __init__(self, name: str, handle: Any, timeout_s: float, restarts: bool = False) -> None:
        self.name = name
        self.shared_place: ActorPlacement | None = None
        """The place of the GPUs that it shares with others: ``build`` refuses any other."""
        self._restarts = restarts
        self._handle = handle
        self._timeout_s = timeout_s

    @classmethod
    def create(
        cls,
        name: str,
        *,
        timeout_s: float,
        env: dict[str, str] | None = None,
        gpus: int = 0,
        bundle: Any = None,
        restarts: bool = False,
        place: ActorPlacement | None = None,
        actor: str | None = None,
        kind: str = ActorShell.__name__,
    ) -> Remote:
        """Starts the process; with ``restarts`` Ray restarts it, without an object, when it dies.

        Ray shows it as ``actor`` of class ``kind``. Raises ActorAlreadyExistsError while Ray has
        another actor of this name.

        It reserves no CPU: actors that mostly wait would block others. ``bundle`` is the strategy
        of ``GpuBundles`` by which Ray chooses its node and its ``gpus``. A process that shares
        those of another one reserves none, and uses the GPUs of that one's ``place``.

        ``ASYNC_OPD_ACTOR`` is its name in its environment and its children's. None of these
        processes imports from the working directory by default.
        """
        options: dict[str, Any] = {"name": actor, "num_cpus": 0, "max_concurrency": 10_000}
        options["enable_task_events"] = False  # Ray's server would store one for every call
        env = {**(env or {}), ACTOR: name, SAFE_PATH: "1"}
        if bundle is not None:
            options["scheduling_strategy"] = bundle
        if place is not None:
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus), LEAVE_GPUS_ALONE: "1"}
        options["runtime_env"] = {"env_vars": env}
        if gpus:
            options["num_gpus"] = gpus
        if restarts:
            options["max_restarts"] = -1
        return cls(name, _shell(kind).options(**options).remote(), timeout_s, restarts)

    async def place(self, timeout_s: float) -> ActorPlacement:
        """The node and the GPUs of the process."""
        place = self._handle.place
        found = await self._bounded(place.remote, timeout_s, "starting a process", START_KEY)
        return cast(ActorPlacement, found)

    async def build(self, factory: str, args: tuple[Any, ...], timeout_s: float) -> None:
        """Builds the object; EngineStartError with the process's last error lines if that fails."""
        try:
            pid = await self._started(timeout_s)
            if self.shared_place is not None:
                self._compare(await self.place(timeout_s), self.shared_place)
            build = partial(self._handle.build.remote, factory, args)
            await self._bounded(build, timeout_s, "building", START_KEY)
        except StageError as error:
            words = await asyncio.to_thread(last_error_lines, pid) if "pid" in locals() else ""
            raise EngineStartError(
                self.name,
                f"did not start: {error.cause}"
                + (f"\n    its last error lines:\n{words}" if words else ""),
                error.remedy,
            ) from error

    def _compare(self, found: ActorPlacement, shared: ActorPlacement) -> None:
        """StageError if Ray has started the process elsewhere, as after the death of its node.

        A guest has no GPUs of its own: only its node is compared.
        """
        if found.node != shared.node or found.gpus not in ((), shared.gpus):
            cause = f"Ray has started it on {found}, but it shares {shared}"
            raise StageError(self.name, cause, "its node was lost: stop the run, and --resume it")

    async def _started(self, timeout_s: float) -> int:
        """The process's id; while Ray ends an earlier process, that of the next one."""
        pid, error = self._handle.pid.remote, None
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    try:
                        return int(await self._bounded(pid, timeout_s, "starting", START_KEY))
                    except ProcessRestarts as again:
                        error = again
                    await asyncio.sleep(RETRY_S)
        except StageTimeout:
            raise
        except TimeoutError as late:
            cause = f"no process of it started within {timeout_s:g} s" + (
                f": {error}" if error else ""
            )
            raise StageTimeout(self.name, cause, f"raise {START_KEY} if it is only slow") from late

    async def listen(self, cluster: ClusterConfig, timeout_s: float) -> tuple[str, int, int]:
        """Opens a socket in its process: address, port and file descriptor."""
        await self._started(timeout_s)
        listen = partial(self._handle.listen.remote, cluster)
        found = await self._bounded(listen, timeout_s, "listening", START_KEY)
        return cast(tuple[str, int, int], found)

    async def call(
        self, method: str, *args: Any, timeout_s: float | None = None, **named: Any
    ) -> Any:
        """Calls a method within ``timeout_s``; ``inf`` is no bound, None the bound of requests."""
        bound = self._timeout_s if timeout_s is None else timeout_s
        key = REQUEST_KEY if timeout_s is None else LIVENESS_KEY
        call = partial(self._handle.call.remote, method, args, named)
        return await self._bounded(call, bound, method, key)

    async def call_with_retry(
        self, method: str, *args: Any, timeout_s: float | None = None, **named: Any
    ) -> Any:
        """As ``call``, repeated when the process died during the call and was restarted."""
        while True:
            try:
                return await self.call(method, *args, timeout_s=timeout_s, **named)
            except ProcessRestarts as error:
                if error.stage != self.name:
                    raise
            await asyncio.sleep(RETRY_S)

    async def _bounded(self, call: Callable[[], Any], timeout_s: float, what: str, key: str) -> Any:
        """Calls, and waits for the answer; the remedy names ``key``, which sets the bound."""
        remedy = f"raise {key} if it can take so long; otherwise it hangs" if key else ""
        try:
            return await Deadline(self.name).within(timeout_s, what, call(), remedy)
        except ray.exceptions.RayError as error:
            raise to_stage_error(self.name, what, error, self._restarts) from error

    async def pid(self, timeout_s: float) -> int:
        """The id of its current process."""
        pid = self._handle.pid.remote
        return int(await self._bounded(pid, timeout_s, "a heartbeat", LIVENESS_KEY))

    async def lag(self, timeout_s: float) -> float:
        """See ActorShell.lag."""
        return float(
            await self._bounded(self._handle.lag.remote, timeout_s, "its lag", LIVENESS_KEY)
        )

    async def is_built(self, timeout_s: float) -> bool:
        """Whether its process has an object: a restarted process has none."""
        is_built = self._handle.is_built.remote
        return bool(await self._bounded(is_built, timeout_s, "a state request", LIVENESS_KEY))

    async def end(self) -> StageError:
        """Waits until the current process has died, or cannot be reached any more."""
        forever = self._handle.block_forever.remote
        try:
            await self._bounded(forever, float("inf"), "its run", "")
        except StageError as error:
            return error
        raise StageError(self.name, "block_forever has returned, which cannot be")

    def restart(self) -> None:
        """Ends the process; Ray starts another one, without an object."""
        ray.kill(self._handle, no_restart=False)

    def kill(self) -> None:
        """Ends the process and its children for good."""
        ray.kill(self._handle)


async def raise_unless_built(remote: Remote, bound: float) -> None:
    """Raises if its process hangs, or was restarted: it then has no object."""
    if not await remote.is_built(bound):
        raise ProcessDied(remote.name, "its process died")


async def raise_at_death(remote: Remote, bound: float) -> None:
    """Raises when its process ends, also if it did before."""
    await raise_unless_built(remote, bound)
    raise await remote.end()


async def end_built(remote: Remote, bound: float) -> None:
    """Restarts a process that has an object, hangs, or gives no answer within the bound.

    Ray's error is the same for a process that it restarts and for one that cannot be reached for a
    while: the next answer tells which.
    """
    with suppress(StageError, TimeoutError):
        async with asyncio.timeout(bound):
            while True:
                try:
                    if not await remote.is_built(bound):
                        return
                    break
                except ProcessRestarts:
                    await asyncio.sleep(RETRY_S)
    remote.restart()
