"""Everything that can die: members, their states, and one stream of events.

       ┌──── a probe succeeds: the same incarnation ────┐
       ▼                                                │
    SERVING ──── a failure of this incarnation ────► EJECTED ──────────────┐
       ▲        its place in the cluster is lost,       │ no probe succeeds │ its policy
       │     ABSENT ◄──── or its node drains ───────────┤                   │ rebuild it
       │        └──────── it has another place ───────┐ │                   │
       │                                              ▼ ▼                   │
       └──── rebuilt: the next incarnation ──────── REBUILDING ◄─┐          │
                                                        │   │    │          │
                                     no try is left ────┤   └────┘          │
                                                        ▼   a try fails:    │
                                                      GONE  the next one    │
                                                        ▲   comes later     │
                                                        └───────────────────┘

A kind of member has a ``Policy``:

    student replicas    pull: their loop and a heartbeat report failures; rebuilt without a probe
    teacher replicas    are pushed and probed: each failed call is reported; readmitted or rebuilt
    queue, scorer, …    are watched, and restarted; each of them is needed
    trainer             one death of a rank rebuilds all ranks, between two pipelines (``mend``);
                        queue, scorer and rollouter are ``replaced`` with it, whatever their states

A member of a pool that grows with the cluster is ABSENT while the cluster lacks room for it.

Balancer, weight sync and GPU time sharing read the members' states, or listen to the events. A
failure names the incarnation that it saw: an answer that comes after a rebuild changes nothing.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, Protocol, TypeVar, cast

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.core.errors import Displaced, StageError
from async_opd.processes.events import Event, State, one_line
from async_opd.waiting.deadline import Deadline, Timer, race
from async_opd.waiting.waits import Waits


class Restarts:
    """The restarts of one replica or stage: at most ``max_restarts`` that are not forgotten.

    Each comes later after its failure than the one before. A restart is forgotten when it is longer
    ago than ``window_s``, and something newer has been reached than before it. So what dies again
    and again at the same place comes to an end, however long it takes to get there.
    """

    def __init__(
        self, config: SupervisionConfig, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._config = config
        self._clock = clock
        self._remembered: list[tuple[float, float]] = []  # when, and what had been reached
        self._newest = -math.inf

    def next_delay(self, reached: float) -> float | None:
        """Counts a restart: the seconds to wait before it, or None if there were too many.

        0, 1, 3, 7 … times ``delay_s``: at once, then later and later. ``reached`` grows with what
        is done, a step for example; a smaller one than before (after a rewind) is nothing new.
        """
        now, self._newest = self._clock(), max(self._newest, reached)
        self._remembered = [
            (when, then)
            for when, then in self._remembered
            if now - when <= self._config.window_s or then >= self._newest
        ]
        before = len(self._remembered)
        if before >= self._config.max_restarts:
            return None
        self._remembered.append((now, self._newest))
        return self._config.delay_s * (2.0**before - 1)


T = TypeVar("T")
Result = TypeVar("Result")

LONGEST_PAUSE_S = 30.0
"""Between two probes of a member that may be away for long."""

DRAINING_S = 2.0
"""Between two looks at the nodes of members: machines may end half a minute after they drain."""


@dataclass(eq=False)
class Member(Generic[T]):
    """Place ``index`` of a set. ``value`` is its actor, ``incarnation`` the number of rebuilds.

    ``failure`` is the newest one, of a call, a probe or a rebuild; None in a member that serves.
    """

    index: int
    name: str
    value: T
    incarnation: int = 0
    state: State = State.SERVING
    failure: Exception | None = None

    def serves(self, incarnation: int) -> bool:
        """Whether it serves, and is still this incarnation."""
        return self.state is State.SERVING and self.incarnation == incarnation


Care = Callable[[Member[T]], Coroutine[Any, Any, Any]]
Probe = Callable[[Member[T]], Coroutine[Any, Any, Exception | None]]
Rebuild = Callable[[Member[T]], Coroutine[Any, Any, T]]
"""The actions on a member: see ``Policy``."""
Errors = type[Exception] | tuple[type[Exception], ...]


class Places(Protocol):
    """The places in the cluster for the members of a set."""

    async def placed(self, index: int) -> None:
        """Returns when a member has a place; gives one up first whose node drains. Unbounded."""

    async def draining(self) -> Mapping[int, str]:
        """The members whose node drains now, each with words for it."""
        ...


@dataclass(frozen=True, kw_only=True)
class Policy(Generic[T]):
    """The actions of a set on its members; all but ``supervision`` may be left out.

    ``serve`` runs while a member serves: its end or error is the member's failure. ``alive`` raises
    if no heartbeat is answered within ``supervision.timeout_s``; one is asked for every
    ``supervision.heartbeat_s``.

    ``leave`` gives back what an ejected member held, before anything else happens to it.

    ``probe`` returns None if an ejected member works, or the error why it does not yet: it is asked
    at most ``probes`` times, later each time, and not after ``patience_s``. It raises for a member
    that only a rebuild can help.

    ``rebuild`` ends the member's process for good and returns what takes its place; an error is a
    failed try. ``reached`` grows with what a member has done; see ``Restarts``.

    ``displaced`` returns the Displaced error of an ejected member that lost its machine or its
    GPUs, once that is certain. Neither its rebuild counts in ``max_restarts`` then, nor a try of a
    rebuild that raises one.

    With ``places`` such a member, and one whose node drains, is ABSENT until it has another place:
    it has not failed. Without, its rebuild waits for the place.

    ``needed`` members at least must be left: fewer end ``MemberSet.run`` with the last failure.

    ``start_s`` is the bound of a rebuild in the lines of ``waits``. ``took_s`` returns how long the
    last start of a member took, if that is known.
    """

    supervision: SupervisionConfig
    serve: Care[T] | None = None
    alive: Care[T] | None = None
    leave: Care[T] | None = None
    probe: Probe[T] | None = None
    probes: float = math.inf
    patience_s: float = math.inf
    displaced: Probe[T] | None = None
    places: Places | None = None
    rebuild: Rebuild[T] | None = None
    reached: Callable[[Member[T]], float] = lambda member: 0.0
    needed: int = 0
    start_s: float = math.inf
    took_s: Callable[[Member[T]], float | None] = lambda member: getattr(
        member.value, "start_s", None
    )


@dataclass
class MemberSet(Generic[T]):
    """The members of one kind, in the order of ``values``. ``run`` supervises all of them.

    One without a value is ABSENT at first; all others serve.

    ``waits`` says which of them are waited for.
    """

    name: str
    values: Mapping[str, T | None]
    policy: Policy[T]
    timer: Timer | None = None
    clock: Callable[[], float] = time.monotonic
    waits: Waits = field(default_factory=lambda: Waits(lambda line: None))
    all: tuple[Member[T], ...] = field(init=False)

    def __post_init__(self) -> None:
        """See the class."""
        self.all = tuple(
            Member(i, name, cast(T, value)) for i, (name, value) in enumerate(self.values.items())
        )
        for member in self.all:
            if member.value is None:
                member.state = State.ABSENT
                member.failure = Displaced(
                    member.name, "it had no place in the cluster at the start"
                )
        config = self.policy.supervision
        self._restarts = {member: Restarts(config, self.clock) for member in self.all}
        self.failures = 0
        self._listeners: list[Callable[[Event], None]] = []
        self._changed = asyncio.Event()

    def __getitem__(self, name: str) -> Member[T]:
        return next(member for member in self.all if member.name == name)

    @property
    def serving(self) -> list[Member[T]]:
        """Those that work now."""
        return [member for member in self.all if member.state is State.SERVING]

    @property
    def present(self) -> list[Member[T]]:
        """Those that have a process, or are to get one."""
        return [m for m in self.all if m.state not in (State.ABSENT, State.GONE)]

    @property
    def left(self) -> list[Member[T]]:
        """Those that are not gone for good."""
        return [member for member in self.all if member.state is not State.GONE]

    @property
    def rebuilds(self) -> int:
        """Rebuilds since the start that succeeded."""
        return sum(member.incarnation for member in self.all)

    def listen(self, listener: Callable[[Event], None]) -> None:
        """``listener`` gets every event from now on, once, in order, after the state changed."""
        self._listeners.append(listener)

    async def until(self, so: Callable[[], bool]) -> None:
        """Returns when ``so()`` is true; it is asked again after every event."""
        while not so():
            await self._changed.wait()

    def fail(self, member: Member[T], incarnation: int, error: Exception) -> bool:
        """Ejects the member; ``run`` probes or rebuilds it.

        False, and nothing happens, if it does not serve, or another incarnation of it does;
        ``failures`` counts it in any case.
        """
        self.failures += 1
        if not member.serves(incarnation):
            return False
        self._move(member, State.EJECTED, error)
        return True

    async def call(
        self,
        member: Member[T],
        bound_s: float,
        what: str,
        work: Callable[[T], Coroutine[Any, Any, Result]],
        spare: Errors = (),
    ) -> Result:
        """The result of a call to a member, within its bound. Its error ejects, and is raised.

        An error of a class in ``spare`` is raised, and is not the member's failure.
        """
        number = member.incarnation
        try:
            return await Deadline(member.name, self.timer).within(bound_s, what, work(member.value))
        except spare:
            raise
        except Exception as error:
            self.fail(member, number, error)
            raise

    async def ask(
        self,
        bound_s: float,
        what: str,
        work: Callable[[T], Coroutine[Any, Any, Result]],
        spare: Errors = (),
    ) -> dict[Member[T], Result]:
        """Calls all members that serve at the same time; the results of those that succeed."""
        serving = self.serving
        calls = (self.call(member, bound_s, what, work, spare) for member in serving)
        found = await asyncio.gather(*calls, return_exceptions=True)
        pairs = zip(serving, found, strict=True)
        return {member: one for member, one in pairs if not isinstance(one, BaseException)}

    def replaced(self, member: Member[T], value: T) -> None:
        """Its next incarnation serves. Other callers may use this only while ``run`` does not."""
        member.value = value
        member.incarnation += 1
        self._move(member, State.SERVING)

    async def run(self) -> None:
        """Until cancelled, or until fewer members are left than are needed; may be run again."""
        async with asyncio.TaskGroup() as group:
            for member in self.left:
                group.create_task(self._keep(member), name=member.name)
            if self.policy.places is not None:
                group.create_task(self._withdraw(self.policy.places), name=f"{self.name} drains")

    async def watch(self, member: Member[T]) -> None:
        """Returns when a member that serves has failed."""
        watching = [self._serve(member, member.incarnation), self._pulse(member)]
        tasks = [asyncio.create_task(work, name=f"{member.name} is watched") for work in watching]
        try:
            await self.until(lambda: member.state is not State.SERVING)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # none outlives this

    async def mend(self, member: Member[T]) -> None:
        """Returns when an ejected member serves again, itself or another incarnation, or is gone.

        Or when it is ABSENT. One that is absent is rebuilt: it has a place.

        Raises its last failure if fewer are left then than are needed.
        """
        bound = (self.policy.patience_s, "")
        if self.policy.rebuild is not None:
            bound = (self.policy.start_s, " a try")
        with self.waits.on(f"{member.name} to serve again", *bound):
            await self._mended(member)

    async def _mended(self, member: Member[T]) -> None:
        policy = self.policy
        if member.state is State.EJECTED:
            if policy.leave is not None:
                await policy.leave(member)
            displaced: Exception | None = member.failure
            if not isinstance(displaced, Displaced):  # its node does not drain
                displaced = policy.displaced and await policy.displaced(member)
            if displaced and policy.places is not None:
                self._move(member, State.ABSENT, displaced)
                return
            if displaced:
                member.failure = displaced
            elif policy.probe is not None and await self._readmitted(member, policy.probe):
                return
        if policy.rebuild is None or not await self._rebuilt(member, policy.rebuild):
            failure = member.failure or StageError(member.name, "cannot be rebuilt")
            self._move(member, State.GONE, failure)
            if len(self.left) < policy.needed:
                raise failure

    # ── one member ─────────────────────────────────────────────────────────────────────────────

    async def _keep(self, member: Member[T]) -> None:
        """One incarnation after the other."""
        while member.state is not State.GONE:
            if member.state is State.SERVING:
                await self.watch(member)
            elif member.state is State.ABSENT and self.policy.places is not None:
                await self.policy.places.placed(member.index)
            await self.mend(member)

    async def _withdraw(self, places: Places) -> None:
        """Ejects members whose nodes drain, before these are lost. Endless."""
        while True:
            for index, why in (await _draining(places)).items():
                if (member := self.all[index]).state is State.SERVING:
                    self._move(member, State.EJECTED, Displaced(member.name, why))
            await Deadline(self.name, self.timer).pause(DRAINING_S)

    async def _start(self, member: Member[T], rebuild: Rebuild[T]) -> None:
        """Rebuilds the member, which serves at once: nothing else is awaited in between.

        Displaced if its node drains, where no process starts.
        """

        async def rebuilt() -> None:
            self.replaced(member, await rebuild(member))

        if (places := self.policy.places) is None:
            await rebuilt()
            return

        async def drains() -> NoReturn:
            while True:
                await self._pause(member, DRAINING_S)
                if why := (await _draining(places)).get(member.index):
                    raise Displaced(member.name, why)

        # one that serves was rebuilt, even if its node is found to drain in the same moment
        await race(rebuilt(), drains())

    async def _serve(self, member: Member[T], incarnation: int) -> None:
        if self.policy.serve is not None:
            failure: Exception = StageError(member.name, "its loop ended during the run")
            try:
                await self.policy.serve(member)
            except Exception as error:
                failure = error
            self.fail(member, incarnation, failure)

    async def _pulse(self, member: Member[T]) -> None:
        """Asks for heartbeats until one is not answered."""
        incarnation = member.incarnation
        try:
            while self.policy.alive is not None:
                await self._pause(member, self.policy.supervision.heartbeat_s)
                await self.policy.alive(member)
        except Exception as error:
            self.fail(member, incarnation, error)

    async def _readmitted(self, member: Member[T], probe: Probe[T]) -> bool:
        """Probes the member, later each time, until it works. False if that does not help."""
        failed, deadline = 0, self.clock() + self.policy.patience_s
        while failed < self.policy.probes and self.clock() < deadline:
            delay_s = self.policy.supervision.delay_s * (2.0 ** min(failed, 64) - 1)
            await self._pause(member, min(delay_s, LONGEST_PAUSE_S))
            try:
                failure = await probe(member)
            except Exception as error:
                member.failure = error
                return False
            if failure is None:
                self._move(member, State.SERVING)
                return True
            member.failure = failure
            failed += 1
        return False

    async def _rebuilt(self, member: Member[T], rebuild: Rebuild[T]) -> bool:
        """Another incarnation, tried later each time; False if none of the tries succeeded.

        A member with ``places`` that loses its place meanwhile is ABSENT again.
        """
        failed: Exception | None = None
        if isinstance(member.failure, Displaced):
            failed = member.failure
        restarts, reached = self._restarts[member], self.policy.reached
        while True:
            counted = not isinstance(failed, Displaced)
            delay_s = restarts.next_delay(reached(member)) if counted else 0.0
            if delay_s is None:
                break
            self._move(member, State.REBUILDING, failed, delay_s)
            await self._pause(member, delay_s)
            try:
                await self._start(member, rebuild)
            except Exception as error:
                failed = error
                if isinstance(error, Displaced) and self.policy.places is not None:
                    self._move(member, State.ABSENT, error)
                    return True
                continue
            return True
        member.failure = failed or member.failure
        return False

    async def _pause(self, member: Member[T], seconds: float) -> None:
        await Deadline(member.name, self.timer).pause(seconds)

    def _move(
        self,
        member: Member[T],
        after: State,
        failure: Exception | None = None,
        delay_s: float = 0.0,
    ) -> None:
        """The only place where a state changes."""
        before, member.state = member.state, after
        member.failure = None if after is State.SERVING else failure or member.failure
        cause = one_line(failure) if failure is not None else ""
        took_s = self.policy.took_s(member) if after is State.REBUILDING else None
        event = Event(member.name, member.incarnation, before, after, cause, delay_s, took_s)
        for listener in self._listeners:
            listener(event)
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()


async def _draining(places: Places) -> Mapping[int, str]:
    """See Places.draining; none while the head does not answer."""
    try:
        return await places.draining()
    except StageError:
        return {}
