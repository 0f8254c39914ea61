"""One weight sync, as a state machine over the sender and its receivers.

    IDLE ─ snapshot(v) ─► READY ─ push ─► CONNECTED ─► PAUSED ─► each replica: receive, finish,
                                  ▲           │           │               resume ─┬─► IDLE, at v
                                  │           └───────────┴──── a part fails ─────┘
                                  │                                   ▼
                                  └── replicas still behind ◄── FAILURES HANDLED

    READY       the trainer has copied its weights out and trains on
    CONNECTED   the group is a collective group, until a member of it fails
    PAUSED      every replica of the group holds its requests in flight (on_sync says how)
    FAILURES    replicas for whose fault the part did not fail are behind: they generate on with the
    HANDLED     old weights, or stay paused if the broadcast broke off when some were replaced; a
                replica that failed or did not answer in time fails as a member of its pool: it is
                never resumed, but rebuilt, and ``rejoin``s with the newest snapshot

All replicas are one group. With ``rolling`` each replica is a separate group, and the others go
on generating with their old weights meanwhile. A push without any replica left succeeds: replicas
that rejoin get its weights. A failure without a failed replica is the sender's; ``tries`` bounds
how often it may come. A sender that is dead, or that hangs beyond the bound of its collective,
ends the push with ProcessDied.
"""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from async_opd.core.errors import (
    ProcessDied,
    StageTimeout,
    TransferAborted,
    WeightSyncError,
    WrongWeights,
)
from async_opd.core.reports import SyncReport
from async_opd.core.stages import TRAINER
from async_opd.processes.members import MemberSet
from async_opd.waiting.deadline import to_its_end
from async_opd.weight_sync.freshness import Freshness
from async_opd.weight_sync.layout import WeightMeta
from async_opd.weight_sync.sync_group import (
    SENDER,
    Failures,
    SyncGroups,
    WeightReceiver,
    WeightSender,
)

Snapshot = tuple[int, WeightMeta]
"""A version of the weights, and what is sent for it."""


TRIES = 3
"""Tries of a run's sync that fails without a failed replica; after the last one the run ends. A
failed replica is rebuilt, and the sync is repeated with the others."""


class BroadcastSync:
    """Implements ``async_opd.core.stages.WeightSync`` by one broadcast per group."""

    def __init__(
        self,
        sender: WeightSender,
        members: MemberSet[Any],
        workers: Sequence[int],
        *,
        on_sync: str,
        timeout_s: float,
        seconds_per_byte: float = 0.0,
        rolling: bool = False,
        tries: int = 1,
        newest: Snapshot | None = None,
        freshness: Freshness | None = None,
        clock: Callable[[], float] = time.perf_counter,
        evaluators: MemberSet[Any] | None = None,
    ) -> None:
        """Every member that serves takes part; its value is a WeightReceiver.

        ``evaluators`` take part in no push, but in ``refresh_evaluators``; their indices follow
        those of ``members``.
        ``workers[i]`` is the number of ranks that member i contributes to its group. ``timeout_s``
        bounds each part, and a broadcast lasts by ``seconds_per_byte`` longer. A pause with
        ``finish`` lasts as long as the longest response: there it bounds the time without a new
        token. ``newest`` is the sender's snapshot, where another coordinator had it made.
        ``freshness`` None: no replica is compared with the trainer.
        """
        self._pools = [members] if evaluators is None else [members, evaluators]
        self._groups = SyncGroups(
            sender,
            [member.value for pool in self._pools for member in pool.all],
            workers,
            on_sync=on_sync,
            timeout_s=timeout_s,
            seconds_per_byte=seconds_per_byte,
            clock=clock,
        )
        self._rolling = rolling
        self._members = members
        self._tries = tries
        self._freshness = freshness
        self._wrong = 0  # replicas found with wrong weights since the start
        self._ends: WrongWeights | None = None  # of a replica that was to join
        self._clock = clock
        self.newest = newest
        self._lock = asyncio.Lock()  # snapshots, pushes, rejoins

    # ── members ────────────────────────────────────────────────────────────────────────────────

    @property
    def _alive(self) -> set[int]:
        return {member.index for member in self._members.serving}

    async def rejoin(self, index: int, receiver: WeightReceiver, workers: int) -> None:
        """Gives the newest weights to the next incarnation of a member. Raises WeightSyncError.

        It is compared with the trainer, by rows only if the newest snapshot was; else the next sync
        is. If its weights are wrong and that ends the run, the next push raises the error too. Its
        group connects again before the next push. The caller has to make the member serve before it
        awaits anything else: a push that begins in between would leave the member out. A
        cancellation takes effect when the transfer has ended: the trainer is part of it.
        """
        async with self._lock:
            self._groups.replace_receiver(index, receiver, workers)
            if self.newest is not None:
                number, failures = await to_its_end(self._update_alone(index))
                if failures:
                    # A rebuild's error is one failed try of its member: only a push ends the run.
                    self._ends = self._counted(failures) or self._ends
                    self._groups.disband(number)
                    raise _worst(failures)

    async def quiet(self) -> None:
        """Returns when no snapshot or transfer is under way. Unbounded."""
        async with self._lock:
            return

    async def refresh_evaluators(self) -> None:
        """Gives the newest weights to the evaluation replicas that serve; they have to be idle.

        One after the other, each a separate group. One that fails is ejected, and rebuilt.
        Raises as ``push`` does if the sender fails.
        """
        async with self._lock:
            for pool in self._pools[1:]:
                for member in pool.serving if self.newest is not None else ():
                    await self._refresh(len(self._members.all) + member.index)

    async def _refresh(self, index: int) -> None:
        for left in reversed(range(self._tries)):
            number, failures = await self._update_alone(index)
            if not failures or await self._handle_failures(number, failures):
                return
            if not left:
                raise _worst(failures)

    async def _update_alone(self, index: int) -> tuple[int, Failures]:
        """Updates a member as a separate group to the newest snapshot. The group's number."""
        assert self.newest is not None
        number = index if self._rolling else 1 + index
        failures = await self._groups.update(number, [index], *self.newest)
        return number, failures or (await self._compare([index], rebuilt=True))[0]

    async def connect(self) -> None:
        """Connects all groups. Raises WeightSyncError if a member does not connect in time."""
        async with self._lock:  # it may go on after its caller's bound, when a push begins
            for number, group in self._numbered_groups(self._alive).items():
                failures = await self._groups.rendezvous(number, group)
                if failures:
                    raise _worst(failures)

    # ── a sync ─────────────────────────────────────────────────────────────────────────────────

    async def snapshot(self, version: int, again: bool = False) -> None:
        """Copies the trainer's weights out as ``version``. ProcessDied if the trainer hangs."""
        async with self._lock:
            try:
                due = self._freshness is not None and self._freshness.due()
                meta = await self._groups.snapshot(version, due)
            except StageTimeout as error:
                raise _hangs(error) from error
            if self._freshness is not None:
                self._freshness.refuse_other_names(meta)
            self.newest = version, meta

    async def push(self) -> SyncReport:
        """Sends the snapshot to every member that serves, group by group."""
        async with self._lock:
            if self.newest is None:
                raise WeightSyncError("weight sync", "push without a snapshot")
            if self._ends is not None:
                raise self._ends
            started = self._clock()
            self._groups.restart_timings()
            rounds = await self._push(*self.newest)
            report = self._report(self._clock() - started, rounds)
            failures, found = await self._compare(sorted(self._alive))
            self._fail(failures)
            if self._freshness is not None:
                found["sync/wrong_weights"] = float(self._wrong)
            return replace(report, metrics={**report.metrics, **found})

    async def _push(self, version: int, meta: WeightMeta) -> int:
        """Updates groups until no member that serves is behind. Returns the number of rounds."""
        behind = set(self._alive)
        rounds = blameless = 0
        while behind:
            rounds += 1
            worst: Exception | None = None
            lost = False
            for number, group in self._numbered_groups(behind).items():
                if self._rolling and group[0] not in self._alive:
                    continue  # it died while the others were updated
                failures = await self._groups.update(number, group, version, meta)
                if failures:
                    lost |= await self._handle_failures(number, failures)
                    worst = _worst(failures)
                behind -= set(group) - set(failures)
            behind &= self._alive  # a rebuilt member gets its weights by rejoin
            # After a round that ejected a replica the next one goes without it. A round that failed
            # without a replica at fault may fail for ever: ``tries`` bounds these.
            blameless += worst is not None and not lost
            if worst is not None and blameless >= self._tries:
                raise worst
        return rounds

    def _report(self, seconds: float, rounds: int) -> SyncReport:
        assert self.newest is not None
        version, meta = self.newest
        alive = sorted(self._alive)
        stalls = [self._groups.stalls[index] for index in alive] or [0.0]
        metrics = {
            "sync/seconds": seconds,
            **self._groups.timings,
            "sync/mib": meta.nbytes / 2**20,
            "sync/rounds": float(rounds),
            "sync/stall_mean_s": statistics.fmean(stalls),
            "sync/stall_max_s": max(stalls),
        }
        metrics |= {f"sync/student/{index}/stall_s": self._groups.stalls[index] for index in alive}
        return SyncReport(version, metrics)

    # ── one group ───────────────────────────────────────────────────────────────────────────────

    async def _handle_failures(self, number: int, failures: Failures) -> bool:
        """Disbands the group and fails the members at fault. Whether there were any.

        A member whose error is TransferAborted is not at fault: the next round updates it.
        """
        self._groups.disband(number)
        dead = {i for i, e in failures.items() if not isinstance(e, TransferAborted)} - {SENDER}
        self._fail({index: failures[index] for index in sorted(dead)})
        sender = failures.get(SENDER)
        if isinstance(sender, ProcessDied):
            raise sender
        if isinstance(sender, StageTimeout):
            raise _hangs(sender)
        return bool(dead)

    # ── freshness ───────────────────────────────────────────────────────────────────────────────

    async def _compare(
        self, group: list[int], rebuilt: bool = False
    ) -> tuple[Failures, dict[str, float]]:
        """Compares members with the trainer, if the newest snapshot has what it takes.

        Of a member that was ``rebuilt`` at least the parameters. Returns the errors of those that
        have wrong weights or do not answer, and metrics. Generation goes on meanwhile, and no other
        sync begins.
        """
        assert self.newest is not None
        meta = self.newest[1]
        if self._freshness is None or not group or not meta.digests:
            return {}, {}
        if meta.reference is None:
            if not rebuilt:
                return {}, {}
            self._freshness.owe()
        started = self._clock()
        rows = () if meta.reference is None else meta.reference.rows
        evidence, failures = await self._groups.evidence(group, rows)
        # on a thread: of a large mixture it takes seconds, in which heartbeats are to go on
        verdict = await asyncio.to_thread(self._freshness.judge, meta, evidence)
        seconds = {
            "sync/freshness_s": self._clock() - started,
            "sync/reference_s": 0.0 if meta.reference is None else meta.reference.seconds,
        }
        return failures | verdict.wrong, verdict.metrics | seconds

    def _fail(self, failures: Failures) -> None:
        """Fails the members. Raises WrongWeights if one has them and that ends the run."""
        if error := self._counted(failures):
            raise error
        for index, failure in failures.items():
            pool, member = [(pool, one) for pool in self._pools for one in pool.all][index]
            pool.fail(member, member.incarnation, failure)

    def _counted(self, failures: Failures) -> WrongWeights | None:
        """Counts replicas with wrong weights. The error of the first one, if that ends the run."""
        wrong = [error for error in failures.values() if isinstance(error, WrongWeights)]
        self._wrong += len(wrong)
        stops = self._freshness is not None and self._freshness.stops
        return wrong[0] if wrong and stops else None

    def _numbered_groups(self, indices: set[int]) -> dict[int, list[int]]:
        """The groups by number: one of all members, or with ``rolling`` one of each."""
        group = sorted(indices)
        if self._rolling:
            return {index: [index] for index in group}
        return {0: group} if group else {}


def _hangs(error: StageTimeout) -> ProcessDied:
    """The error of a sender that does not answer: it is restarted like one that died."""
    return ProcessDied(TRAINER, f"it hangs: {error.cause}", error.remedy)


def _worst(failures: Failures) -> Exception:
    """The failure to raise: a receiver's own if there is one, else the sender's."""
    order = sorted(failures.items(), key=lambda item: isinstance(item[1], TransferAborted))
    receivers = [error for index, error in order if index != SENDER]
    found = receivers[0] if receivers else failures[SENDER]
    if isinstance(found, TransferAborted) and SENDER in failures:
        return failures[SENDER]
    return found
