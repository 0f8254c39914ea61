"""The one Ray actor shell: it builds a plain object in a separate process and calls its methods.

    driver ── build("module:callable", args) ──► ActorShell ── call("method", args) ──► object

Only ``Remote`` calls an ActorShell; the typed proxies of ``async_opd.cluster.proxies`` use it.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import inspect
import math
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from threading import Thread
from time import monotonic
from types import ModuleType
from typing import Any, cast

import ray
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_opd.cluster.faults import NODE, last_error_lines, to_stage_error
from async_opd.cluster.network import name_interface, own_address
from async_opd.cluster.watching import (
    PLACED,
    POLL_S,
    REMOVED,
    Node,
    group_state,
    lost_node,
    nodes,
)
from async_opd.config.sections.cluster import ClusterConfig
from async_opd.core.errors import (
    Displaced,
    EngineStartError,
    ProcessDied,
    ProcessRestarts,
    StageError,
    StageTimeout,
    first_cause,
)
from async_opd.files.private_folder import private_compile_cache
from async_opd.files.safe_open import PRIVATE_UMASK
from async_opd.models import torchvision_operators, unasked
from async_opd.processes.listening import listening_socket
from async_opd.processes.loop_lag import LoopLag
from async_opd.processes.own_settings import SAFE_PATH, give_back_large_blocks, yield_to_starting
from async_opd.waiting.deadline import Bound, Deadline, race

START_KEY, REQUEST_KEY, LIVENESS_KEY = (
    "timeouts.engine_start_s",
    "timeouts.request_s",
    "supervision.timeout_s",
)
"""Config keys of bounds, for remedies."""
WORDS_S = 30.0
"""Seconds in which another node has to send the last lines of a log."""
LAST_LINES_S = 3.0
"""As ``WORDS_S``, while a process that died is to be rebuilt."""
CONFIRM_S = 1.0
"""Seconds for the head to confirm that it ends a process, which it does within a millisecond."""
RETRY_S = 0.05
"""Seconds before a call is repeated whose process died."""


@dataclass(frozen=True)
class ActorPlacement:
    """The node and the GPUs of a process, for other processes to share."""

    node: str
    gpus: tuple[str, ...]
    process: str = field(default="", compare=False)
    """Ray's id of the process; the next one has another."""

    def __str__(self) -> str:
        return f"GPU {', '.join(self.gpus) or '–'} of node {self.node}"


def own_place() -> ActorPlacement:
    """The node and the GPUs of this process."""
    context = ray.get_runtime_context()
    gpus = context.get_accelerator_ids().get("GPU", [])
    return ActorPlacement(context.get_node_id(), tuple(map(str, gpus)), context.get_worker_id())


ACTOR = "ASYNC_OPD_ACTOR"
KEEP_VISIBLE_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Without it Ray hides all GPUs from a process that reserves none."""


def imported(module: str) -> ModuleType:
    """Imports without garbage collection, which finds nothing and takes a quarter of the time.

    vLLM and its imports take 4.8 s of processor time instead of 6.4. Later collections leave out
    what the first import made, which lives as long as the process.
    """
    first = module not in sys.modules or not gc.get_freeze_count()
    gc.disable()
    try:
        found = importlib.import_module(module)
        if first:  # a freeze at each build would keep the garbage of the object before
            gc.freeze()
        return found
    finally:
        gc.enable()


class ActorShell:
    """The object in an actor's process. Ray runs it on uvloop; calls are concurrent."""

    def __init__(self) -> None:
        os.umask(PRIVATE_UMASK)  # a joined cluster may have another
        private_compile_cache()
        give_back_large_blocks()
        torchvision_operators.install()
        unasked.never_ask()
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

    async def reach(self, other: Remote, timeout_s: float) -> None:
        """Returns when another process answers this one; it may be a later process than before."""
        await other.reached(timeout_s)

    async def block_forever(self) -> None:
        """Never returns: its caller gets an error when the process ends."""
        await asyncio.Event().wait()

    async def place(self) -> ActorPlacement:
        """The node and the GPUs of the process."""
        return own_place()

    async def listen(self, cluster: ClusterConfig) -> tuple[str, int, int]:
        """Opens a socket for the object to build: its address, port and file descriptor."""
        address = own_address(cluster)
        listener = listening_socket(address, cluster.port_range)
        return address, int(listener.getsockname()[1]), listener.detach()

    async def build(self, factory: str, args: tuple[Any, ...]) -> None:
        """Builds the object: imports ``module:callable``, calls it, and awaits a coroutine."""
        name_interface(os.environ)
        module, _, name = factory.partition(":")
        made = getattr(imported(module), name)(*args)
        self._object = await made if inspect.isawaitable(made) else made
        await asyncio.to_thread(yield_to_starting)
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
        """The place of the GPUs of its host, which it uses: ``build`` refuses another node."""
        self.compare_node: Callable[[str], Awaitable[None]] | None = None
        """``build`` calls it with its node's id first: it raises for one that differs."""
        self.group: PlacementGroup | None = None
        """Its reserved GPUs."""
        self.start_s: float | None = None
        """Seconds that its last start took."""
        self.node = ""
        """Ray's id of the node of its process, once that has started."""
        self.process = ""
        """Ray's id of its process, once that has started."""
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
            env |= {"CUDA_VISIBLE_DEVICES": ",".join(place.gpus), KEEP_VISIBLE_GPUS: "1"}
        options["runtime_env"] = {"env_vars": env}
        if gpus:
            options["num_gpus"] = gpus
        if restarts:
            options["max_restarts"] = -1
        made = cls(name, _shell(kind).options(**options).remote(), timeout_s, restarts)
        made.group = getattr(bundle, "placement_group", None)
        made.shared_place = place
        return made

    @classmethod
    async def place_of(
        cls, name: str, actor: str, bundle: Any, gpus: int, timeout_s: float
    ) -> ActorPlacement:
        """The GPUs of a bundle: those of its ``actor``, or of a task that asks for all of them.

        A process of the actor that dies leaves them to the task. One that could not be reached, or
        is created later, has them itself: it is asked again while the task waits.
        """
        host = cls(name, None, timeout_s)

        async def again() -> ActorPlacement:
            while (place := await host._asked(actor)) is None:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            return place

        async def found() -> ActorPlacement:
            if (place := await host._asked(actor)) is not None:
                return place
            return await race(host._of_task(bundle, gpus), again())

        remedy = f"raise {START_KEY} if it can take so long; otherwise it hangs"
        return await Deadline(name).within(timeout_s, "waiting for its GPUs", found(), remedy)

    async def _asked(self, actor: str) -> ActorPlacement | None:
        """The place of the actor's process; None if there is none, or it cannot be reached."""
        with suppress(ValueError, StageError):  # no actor has this name
            await nodes()  # raises if the head does not answer: the next call would not end
            self._handle = await asyncio.to_thread(ray.get_actor, actor)
            return await self.place(math.inf)
        return None

    async def _of_task(self, bundle: Any, gpus: int) -> ActorPlacement:
        """The place of a task that has all GPUs of the bundle."""
        options: dict[str, Any] = {"num_cpus": 0, "num_gpus": gpus, "scheduling_strategy": bundle}
        task = ray.remote(own_place).options(**options, runtime_env={"env_vars": {SAFE_PATH: "1"}})
        place = task.remote()
        try:
            found = await self._bounded(lambda: place, math.inf, "waiting for its GPUs", "")
            return cast(ActorPlacement, found)
        except asyncio.CancelledError:
            ray.cancel(place)  # the host would wait for these GPUs
            raise

    async def place(self, timeout_s: float) -> ActorPlacement:
        """The node and the GPUs of the process."""
        place = self._handle.place
        found = await self._bounded(place.remote, timeout_s, "starting", START_KEY)
        return cast(ActorPlacement, found)

    async def placed(self) -> None:
        """Returns when its reserved GPUs are on a node, or were given to another process.

        It has no bound: a cluster without enough GPUs is not a failure of the process.
        """
        self.node = ""
        while self.group is not None:
            with suppress(StageError):  # the head does not answer
                state, self.node = await self._state(self.group)
                if state in (PLACED, REMOVED):
                    return
            await Deadline(self.name).pause(POLL_S)

    async def build(self, factory: str, args: tuple[Any, ...], timeout_s: float) -> None:
        """Builds the object; EngineStartError with the process's last error lines if that fails.

        Displaced if it fails since the process lost its machine.
        """
        await self.placed()
        began = monotonic()
        try:
            found = await self._started(timeout_s)
            self.node, self.process = found.node, found.process
            if self.shared_place is not None and found.node != self.shared_place.node:
                cause = f"Ray has started it on {found}, but its host had {self.shared_place}"
                raise Displaced(self.name, cause, NODE)
            if self.compare_node is not None:
                await self.compare_node(found.node)
            build = partial(self._handle.build.remote, factory, args)
            await self._bounded(build, timeout_s, "building", START_KEY)
            self.start_s = monotonic() - began
        except StageError as error:
            if isinstance(error, Displaced):
                raise
            if (displaced := await self.displaced()) is not None:
                raise displaced from error
            words = await self._error_lines(found) if "found" in locals() else ""
            raise EngineStartError(
                self.name,
                f"did not start: {error.cause}"
                + (f"\n    its last error lines:\n{words}" if words else ""),
                error.remedy,
            ) from error

    async def _error_lines(self, at: ActorPlacement, bound_s: float = WORDS_S) -> str:
        """From its log, which a task on its node reads: the process may be dead, or hang."""
        if not ray.is_initialized() or at.node == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(last_error_lines, at.process)
        read = ray.remote(last_error_lines).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(at.node, soft=False),
            runtime_env={"env_vars": {SAFE_PATH: "1"}},
        )
        with suppress(StageError):
            ask = partial(read.remote, at.process)
            return str(await self._bounded(ask, bound_s, "reading its log", ""))
        return ""

    async def displaced(self) -> Displaced | None:
        """The error that says so if its machine is lost, after the head's verdict, or its GPUs."""
        if (node := await lost_node(self.node)) is not None:
            return Displaced(self.name, node.loss, NODE)
        state = PLACED
        with suppress(StageError):  # the head does not answer
            state = PLACED if self.group is None else (await self._state(self.group))[0]
        if state == PLACED:
            return None
        gone = "its GPUs were given to a more important process"
        cause = (
            gone
            if state == REMOVED
            else "its place in the cluster is lost, and it waits for another one"
        )
        return Displaced(self.name, cause, "join machines with GPUs")

    async def _state(self, group: PlacementGroup) -> tuple[str, str]:
        await nodes()  # raises if the head does not answer: the next call would not end
        return await asyncio.to_thread(group_state, group)

    async def _started(self, timeout_s: float) -> ActorPlacement:
        """Where its process is; while Ray ends an earlier process, that of the next one."""
        error = None
        try:
            async with Bound(timeout_s):
                while True:
                    try:
                        return await self.place(timeout_s)
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

    def call(
        self,
        method: str,
        *args: Any,
        timeout_s: float | None = None,
        retry: bool = False,
        **named: Any,
    ) -> Coroutine[Any, Any, Any]:
        """Calls a method within ``timeout_s``: ``inf`` is unbounded, None the bound of requests.

        ``retry``: repeats a call during which the process died and was restarted.
        """
        bound = self._timeout_s if timeout_s is None else timeout_s
        key = REQUEST_KEY if timeout_s is None else LIVENESS_KEY
        call = partial(self._handle.call.remote, method, args, named)
        return self._bounded(call, bound, method, key, retry)

    def send(self, method: str, *args: Any) -> None:
        """Calls a method and waits for nothing: a process that has died needs no answer."""
        self._handle.call.remote(method, args, {})

    async def _bounded(
        self, call: Callable[[], Any], timeout_s: float, what: str, key: str, retry: bool = False
    ) -> Any:
        """Calls, and waits for the answer; the remedy names ``key``, which sets the bound."""
        remedy = f"raise {key} if it can take so long; otherwise it hangs" if key else ""
        while True:
            try:
                if timeout_s == math.inf:
                    return await call()
                return await Deadline(self.name).within(timeout_s, what, call(), remedy)
            except ray.exceptions.RayError as error:
                # retry: one that was only unreachable answers again, as one that is restarted
                failure = to_stage_error(self.name, what, error, self._restarts or retry)
                # only its own restart: an error of another process comes through this one
                if not (retry and isinstance(failure, ProcessRestarts)) or (
                    failure.stage != self.name
                ):
                    raise await self._with_node(failure, what) from error
            await asyncio.sleep(RETRY_S)

    async def _with_node(self, failure: StageError, what: str) -> StageError:
        """A death with its machine, if that is lost, or one of several that its log may be on.

        The death of another process, which comes through this one, keeps its name.
        """
        if failure.stage != self.name:
            return failure
        found: Mapping[str, Node] = {}
        if isinstance(failure, ProcessDied):
            with suppress(StageError):  # the head does not answer
                found = await nodes()
        node = found.get(self.node)
        if node is None or len(found) < 2:
            return failure
        if not node.alive:
            return type(failure)(self.name, f"{node.loss}, during {what}", NODE)
        return type(failure)(self.name, f"on {node.name}: {failure.cause}", failure.remedy)

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

    async def reached(self, timeout_s: float) -> None:
        """Returns when its process answers, after a restart too. Raises what ``reach`` raises."""
        await self._answered(self._handle.is_built.remote, timeout_s, "a call")

    async def reach(self, other: Remote, timeout_s: float) -> None:
        """StageTimeout if its process does not reach another one in time.

        One that cannot be reached itself is asked again; ProcessDied if Ray says that it is dead,
        or the other one, and starts no other process.
        """
        reach = partial(self._handle.reach.remote, other, timeout_s)
        await self._answered(reach, timeout_s, f"a call to {other.name}")

    async def _answered(self, call: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Calls until there is an answer; the bound is that of all calls together."""
        asked = self._bounded(call, math.inf, what, "", retry=True)
        remedy = f"raise {LIVENESS_KEY} if it can take so long; otherwise it hangs"
        await Deadline(self.name).within(timeout_s, what, asked, remedy)

    async def end(self) -> StageError:
        """Waits until the current process has died, or cannot be reached any more.

        The error has its last error lines, unless its node is lost or silent.
        """
        forever = self._handle.block_forever.remote
        try:
            await self._bounded(forever, float("inf"), "its run", "")
        except StageError as error:
            at = ActorPlacement(self.node, (), self.process)
            if not at.process or error.stage != self.name or not isinstance(error, ProcessDied):
                return error
            words = await self._error_lines(at, LAST_LINES_S)
            cause = f"{error.cause}\n    its last error lines:\n{words}" if words else error.cause
            return type(error)(self.name, cause, error.remedy)
        raise StageError(self.name, "block_forever has returned, which cannot be")

    def restart(self) -> None:
        """Ends the process; Ray starts another one, without an object."""
        _confirmed(partial(ray.kill, self._handle, no_restart=False))

    def kill(self) -> None:
        """Ends the process and its children for good."""
        _confirmed(partial(ray.kill, self._handle))


def _confirmed(work: Callable[[], None]) -> None:
    """Does what Ray's head confirms; returns after ``CONFIRM_S`` without its answer.

    Ray waits for the answer of a lost head without end. The event loop that calls this is the one
    that has to notice the loss.
    """
    errors: list[Exception] = []

    def body() -> None:
        try:
            work()
        except Exception as error:
            errors.append(error)

    thread = Thread(target=body, name="end a process", daemon=True)
    thread.start()
    thread.join(CONFIRM_S)
    if errors:
        raise errors[0]


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
    while: the next answer shows which.
    """
    with suppress(StageError, TimeoutError):
        async with Bound(bound):
            while True:
                try:
                    if not await remote.is_built(bound):
                        return
                    break
                except ProcessRestarts:
                    await asyncio.sleep(RETRY_S)
    remote.restart()
