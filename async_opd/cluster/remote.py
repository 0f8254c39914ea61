"""Calls to the process of an actor, from all others: they are bounded, and their errors are ours.

Only ``Remote`` calls an ActorShell; the typed proxies of ``async_opd.cluster.proxies`` use it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from functools import cache, partial
from threading import Thread
from time import monotonic
from typing import Any, TypeVar, cast

import ray
from ray.exceptions import ActorAlreadyExistsError, RpcError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_opd.cluster.actor_shell import ACTOR, ActorPlacement, ActorShell, own_place
from async_opd.cluster.faults import NODE, last_error_lines, to_stage_error
from async_opd.cluster.placement.gpu_bundles import PLACED, REMOVED, group_state
from async_opd.cluster.placement.nodes import POLL_S, Node, lost_node, nodes
from async_opd.config.sections.cluster import ClusterConfig
from async_opd.core.errors import (
    Displaced,
    EngineStartError,
    ProcessDied,
    ProcessRestarts,
    StageError,
    StageTimeout,
)
from async_opd.processes.own_settings import SAFE_PATH
from async_opd.waiting.deadline import Bound, Deadline, race

Result = TypeVar("Result")
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
LASTS_S = 5.0
"""Seconds for which the network to a host may fail without a line about it."""
RETRY_S = 0.05
"""Seconds before a call is repeated whose process died."""
KEEP_VISIBLE_GPUS = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
"""Without it Ray hides all GPUs from a process that reserves none."""


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
        cls,
        name: str,
        actor: str,
        bundle: Any,
        gpus: int,
        timeout_s: float,
        notify: Callable[[str], None],
    ) -> ActorPlacement:
        """The GPUs of a bundle: those of its ``actor``, or of a task that asks for all of them.

        A process of the actor that dies leaves them to the task. One that could not be reached, or
        is created later, has them itself: it is asked again while the task waits. ``notify`` gets a
        line when the network to it has failed for ``LASTS_S``.
        """
        host = cls(name, None, timeout_s)
        failed: StageError | None = None  # by the network, the last time
        since, last, warned = 0.0, 0.0, False

        async def asked() -> ActorPlacement | None:
            nonlocal failed, since, last, warned
            try:
                place = await host._asked(actor)
                if monotonic() - last >= LASTS_S:
                    failed = None
                return place
            except StageError as error:
                if not isinstance(error.__cause__, RpcError):
                    raise
                now = monotonic()
                failed, since, last = error, since if failed else now, now
                if not warned and now - since >= LASTS_S:
                    warned = True
                    lasts = f"it fails for {now - since:.0f} s, and is asked again for at most"
                    notify(f"{name}: {error.cause}; {lasts} {timeout_s:g} s in all; {error.remedy}")
                return None

        async def again() -> ActorPlacement:
            while (place := await asked()) is None:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)
            return place

        async def found() -> ActorPlacement:
            if (place := await asked()) is not None:
                return place
            return await race(host._of_task(bundle, gpus), again())

        try:
            return await host._within(timeout_s, "waiting for its GPUs", found(), START_KEY)
        except StageTimeout as late:
            if failed is None:
                raise
            raise StageTimeout(name, f"{late.cause}: {failed.cause}", failed.remedy) from failed

    async def _asked(self, actor: str) -> ActorPlacement | None:
        """The place of the actor's process; None if it is not there, or the head is silent.

        StageError by an RpcError if the network to it fails.
        """
        try:
            await nodes()  # the next call would not end if the head does not answer
        except StageError:
            return None
        look_up = partial(asyncio.to_thread, ray.get_actor, actor)
        try:
            self._handle = await self._bounded(look_up, math.inf, "a search for it", "")
            return await self.place(math.inf)
        except (ValueError, ProcessDied):  # ValueError: none has this name
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

        It has no bound: a cluster without enough GPUs is not a failure of the process. One that Ray
        does not restart waits for nothing: it had its GPUs when it was created.
        """
        self.node = self.process = ""
        while self.group is not None:
            with suppress(StageError):  # the head does not answer
                state, self.node = await self._state(self.group)
                if state in (PLACED, REMOVED) or not self._restarts:
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
        except Displaced:
            raise
        except StageError as error:
            if (displaced := await self.displaced()) is not None:
                raise displaced from error
            cause = await self._with_last_lines(f"did not start: {error.cause}", WORDS_S)
            raise EngineStartError(self.name, cause, error.remedy) from error

    async def _with_last_lines(self, cause: str, bound_s: float) -> str:
        """The cause with its last error lines, unless it never started or its node is silent."""
        words = ""
        with suppress(StageError):
            words = await self._last_lines(bound_s) if self.process else ""
        return f"{cause}\n    its last error lines:\n{words}" if words else cause

    async def _last_lines(self, bound_s: float) -> str:
        """From its log, which a task on its node reads: the process may be dead, or hang."""
        if not ray.is_initialized() or self.node == ray.get_runtime_context().get_node_id():
            return await asyncio.to_thread(last_error_lines, self.process)
        read = ray.remote(last_error_lines).options(
            num_cpus=0,
            max_retries=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(self.node, soft=False),
            runtime_env={"env_vars": {SAFE_PATH: "1"}},
        )
        ask = partial(read.remote, self.process)
        return str(await self._bounded(ask, bound_s, "reading its log", ""))

    async def displaced(self) -> Displaced | None:
        """The error that says so if its machine is lost, after the head's verdict, or its GPUs."""
        if (node := await lost_node(self.node)) is not None:
            return Displaced(self.name, node.loss, NODE)
        state = PLACED
        if self.group is not None:
            with suppress(StageError):  # the head does not answer
                state, _ = await self._state(self.group)
        if state == PLACED:
            return None
        cause = (
            "its GPUs were given to a more important process"
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
        """Calls, and waits for the answer; see ``_within``."""
        while True:
            try:
                return await self._within(timeout_s, what, call(), key)
            except ray.exceptions.RayError as error:
                # retry: one that was only unreachable answers again, as one that is restarted
                failure = to_stage_error(self.name, what, error, self._restarts or retry)
                # only its own restart: an error of another process comes through this one
                if not (retry and isinstance(failure, ProcessRestarts)) or (
                    failure.stage != self.name
                ):
                    raise await self._with_node(failure, what) from error
            await asyncio.sleep(RETRY_S)

    async def _within(
        self, timeout_s: float, what: str, work: Awaitable[Result], key: str
    ) -> Result:
        """Awaits the work; the remedy of StageTimeout names ``key``, which sets the bound."""
        remedy = f"raise {key} if it can take so long; otherwise it hangs" if key else ""
        return await Deadline(self.name).within(timeout_s, what, work, remedy)

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
        reach = partial(self._handle.reach.remote, other.reached, timeout_s)
        await self._answered(reach, timeout_s, f"a call to {other.name}")

    async def _answered(self, call: Callable[[], Any], timeout_s: float, what: str) -> None:
        """Calls until there is an answer; the bound is that of all calls together."""
        asked = self._bounded(call, math.inf, what, "", retry=True)
        await self._within(timeout_s, what, asked, LIVENESS_KEY)

    async def end(self) -> StageError:
        """Waits until the current process has died, or cannot be reached any more.

        The error has its last error lines, unless its node is lost or silent.
        """
        forever = self._handle.block_forever.remote
        try:
            await self._bounded(forever, math.inf, "its run", "")
        except StageError as error:
            if error.stage != self.name or not isinstance(error, ProcessDied):
                return error
            cause = await self._with_last_lines(error.cause, LAST_LINES_S)
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


async def when_free(create: Callable[[], Remote], name: str, timeout_s: float) -> Remote:
    """The actor of ``create()``, as soon as Ray has freed the name of its predecessor.

    Ray frees the name of an actor that is killed, or whose owner has died. It does not free the
    name of one that crashed: a rebuild kills that one first. A head that does not answer is asked
    again: ``ClusterWatch`` ends the run if it is lost. Raises StageTimeout after ``timeout_s``.
    """
    last = "Ray's head does not answer"
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                try:
                    await nodes()  # ``create`` would wait without end for a head that is lost
                    return create()
                except ActorAlreadyExistsError:
                    last = "another actor still has its name in Ray"
                except StageError as silent:
                    last = silent.cause
                await asyncio.sleep(RETRY_S)
    except TimeoutError as error:
        cause = f"{last} after {timeout_s:g} s"
        raise StageTimeout(name, cause, f"raise {START_KEY} if Ray is only slow") from error
