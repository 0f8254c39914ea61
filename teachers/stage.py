"""The scoring stage: moves rollouts through their teachers.

    topic rollouts/<teacher> ──lease──► pool ──► topic scored
                                         └─────► topic dead: what no replica could score

The ``ScoreBacklog`` of a GPU host holds the rollouts of its colocated teachers until their scoring
phase.

Each teacher has its own loops: a slow teacher does not delay the others. Consumes leases of
rollouts, produces samples, waits for rollouts, for room on a replica and for room in the queue. The
next get acknowledges a lease, after its samples are in the queue.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import chain

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.config.sections.teachers import HealthConfig
from async_opd.core.batch import Batch
from async_opd.core.errors import LeaseExpired
from async_opd.core.reports import Events, Progress, StageReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import DEAD, SCORED, Lease, Queue, SamplingSpec, rollouts_topic
from async_opd.processes.events import EventLog
from async_opd.queue.lease_holder import LeaseHolder
from async_opd.queue.sizes import EpisodeBounds
from async_opd.sharing.backlog import ScoreBacklog
from async_opd.waiting.deadline import StageCalls, Timer, gather_or_cancel, offload
from async_opd.waiting.waits import Waits
from teachers.meter import IDLE
from teachers.pool import ScoreResult, TeacherPool
from teachers.replica_slots import (
    IN_FLIGHT,
    EndpointClient,
    Health,
    RebuildTeacher,
    ReplicaSlots,
    ScoringReplica,
    TeacherWeights,
)

ROOM = "room in the queue"
"""The wait of an idle teacher whose samples do not fit into the topic ``scored``."""


class ScorerStage:
    """Implements ``async_opd.core.stages.TeacherScorer`` over the replicas of all teachers."""

    def __init__(
        self,
        teachers: Mapping[str, Sequence[ScoringReplica | None]],
        queue: Queue,
        batch_sizes: Mapping[str, int],
        health: Mapping[str, Health] | None = None,
        rebuild: RebuildTeacher | None = None,
        supervision: SupervisionConfig | None = None,
        consumer: str = "",
        hosts: Mapping[str, str] | None = None,
        backlog_size: int = 1,
        call_tokens: Mapping[str, int] | None = None,
        start_s: float = math.inf,
        episodes: EpisodeBounds | None = None,
        timer: Timer | None = None,
    ) -> None:
        """``batch_sizes[teacher]`` is the most rollouts in one call to a replica of it.

        ``consumer`` is the stage's name in the queue. ``hosts[teacher]`` names the pool of GPU
        hosts of a colocated teacher; ``backlog_size`` rollouts make its backlog full.
        ``call_tokens[teacher]`` bounds the tokens of a call: its answer is one message.
        ``start_s``: see Policy. ``episodes``: the bounds of the teachers' own answers, if these
        are episodes.
        """
        self._hosts = dict(hosts or {})
        self._event_log = EventLog()
        self._pools = _pools(
            teachers,
            health or {},
            rebuild,
            supervision,
            asleep=self._hosts,
            start_s=start_s,
            episodes=episodes,
        )
        waits = Waits(self._event_log.append, timer)
        for pool in self._pools.values():
            pool.slots.members.listen(lambda event: self._event_log.append(str(event)))
            pool.slots.members.waits = waits
        self._backlogs = {
            host: ScoreBacklog(
                [name for name, of in self._hosts.items() if of == host], backlog_size
            )
            for host in self._hosts.values()
        }
        self._awake = set(self._hosts)  # an earlier stage may have left them awake
        self._slept = asyncio.Event()
        self._phases = {host: asyncio.Lock() for host in self._backlogs}  # held in a scoring phase
        self._group = asyncio.TaskGroup()
        self._queue = queue
        self._leases = LeaseHolder(queue, consumer, timer)
        self._batch_sizes = dict(batch_sizes)
        self._call_tokens = dict(call_tokens or {})
        self._putting: Counter[str] = Counter()  # scored batches that are being put, by teacher
        # seconds of puts since the last report, by teacher
        self._put_s: defaultdict[str, float] = defaultdict(float)
        self._rebuild = rebuild
        self._work: asyncio.Task[None] | None = None
        self._calls = StageCalls("scorer")

    async def run(self) -> None:
        """Scores until cancelled. An error that no pool recovers from ends all loops."""
        self._work = asyncio.create_task(self._run(), name="scoring")
        try:
            await self._work
        finally:
            self._work.cancel()
            self._leases.close()

    async def _run(self) -> None:
        async with asyncio.TaskGroup() as group:
            self._group = group
            for name, pool in self._pools.items():
                group.create_task(pool.slots.members.run(), name=f"teacher {name}")
                if name in self._hosts:
                    group.create_task(self._fill_backlog(name), name=f"teacher {name} holds")
                    continue
                for index in range(IN_FLIGHT * len(pool.slots.members.left)):
                    name_of_loop = f"teacher {name} loop {index}"
                    group.create_task(self._score(name, index), name=name_of_loop)

    async def _score(self, teacher: str, index: int) -> None:
        """One loop: as many of them take rollouts as there are replicas to score."""
        topic, size = rollouts_topic(teacher), self._batch_sizes[teacher]
        members = self._pools[teacher].slots.members

        def has_replica() -> bool:
            return index < IN_FLIGHT * max(len(members.present), 1)  # one to raise NoReplica

        done: int | None = None
        while True:
            if not has_replica():
                if done is not None:
                    with suppress(LeaseExpired):  # as in ``_next``
                        await self._leases.ack(topic, done)
                done = None
                await members.until(has_replica)
            lease = await self._next(topic, size, done, self._call_tokens.get(teacher))
            await self._put(teacher, await self._pools[teacher].score(Batch.join(lease.batches)))
            done = lease.id

    async def _put(self, teacher: str, scored: ScoreResult) -> None:
        self._putting[teacher] += 1
        started = time.perf_counter()
        try:
            for parts in Batch.messages(scored.samples):
                nbytes = sum(part.nbytes for part in parts) if len(parts) > 1 else 0
                await self._queue.put(SCORED, await offload(nbytes, Batch.join, parts))
            for lost in Batch.packed(scored.lost):
                await self._queue.put(DEAD, lost)
        finally:
            self._putting[teacher] -= 1
            self._put_s[teacher] += time.perf_counter() - started

    async def _next(
        self, topic: str, size: int, done: int | None, tokens: int | None = None
    ) -> Lease:
        try:
            return await self._leases.get(topic, size, ack=done, tokens=tokens)
        except LeaseExpired:  # its rollouts are scored again; the trainer drops duplicates
            return await self._leases.get(topic, size, tokens=tokens)

    # ── time sharing ───────────────────────────────────────────────────────────────────────────

    async def wait_asleep(self, host: str) -> None:
        """See async_opd.sharing.time_sharing.GpuGuests."""
        await self._calls.run(self._wait_asleep(host))

    async def _wait_asleep(self, host: str) -> None:
        await self._slept_since_start(host)
        async with self._phases[host]:  # a phase outlives the caller that asked for it
            pass

    async def _slept_since_start(self, host: str) -> None:
        while any(self._hosts[name] == host for name in self._awake):
            self._slept.clear()
            await self._slept.wait()

    async def wait_for_work(self, host: str) -> None:
        """See async_opd.sharing.time_sharing.GpuGuests."""
        await self._backlogs[host].wait_for_work()

    async def wait_for_backlog(self, host: str) -> None:
        """See async_opd.sharing.time_sharing.GpuGuests."""
        await self._backlogs[host].wait_for_backlog()

    async def take_turn(self, host: str) -> None:
        """See async_opd.sharing.time_sharing.GpuGuests. Later rollouts wait for the next phase.

        After the death of an earlier stage in this phase the call waits until the host's teachers
        sleep, and scores the rollouts that they hold by then.
        """
        await self._calls.run(self._score_backlog(host))

    async def _score_backlog(self, host: str) -> None:
        await self._slept_since_start(host)
        async with self._phases[host]:
            await self._score_held(self._backlogs[host])

    async def _score_held(self, backlog: ScoreBacklog) -> None:
        backlog.begin()
        while (teacher := backlog.next_teacher) is not None:
            pool = self._pools[teacher]
            await pool.slots.wake()
            loops = IN_FLIGHT * max(len(pool.slots.members.left), 1)  # one to raise NoReplica
            await gather_or_cancel(
                *(self._score_backlog_of(teacher, backlog) for _ in range(loops))
            )
            await pool.slots.sleep()
        backlog.end()

    async def _fill_backlog(self, teacher: str) -> None:
        """Puts the teacher to sleep, and leases rollouts into its backlog as room allows.

        An earlier stage may have left the teacher awake. A replica that does not go to sleep is
        ended: its hosts wake up next, and it is rebuilt in its teacher's next turn.
        """
        await self._pools[teacher].slots.rest()
        self._awake.discard(teacher)
        self._slept.set()
        backlog, topic = self._backlogs[self._hosts[teacher]], rollouts_topic(teacher)
        while True:
            at_most = min(await backlog.room(teacher), self._batch_sizes[teacher])
            lease = await self._leases.get(topic, at_most, tokens=self._call_tokens.get(teacher))
            await backlog.hold(teacher, lease)

    async def _score_backlog_of(self, teacher: str, backlog: ScoreBacklog) -> None:
        """Scores batches. Their samples are put while the next is scored, and after the phase."""
        pool = self._pools[teacher]
        while True:
            request = backlog.next_request(teacher)
            if request is not None:
                await request()
                continue
            tokens = self._call_tokens.get(teacher, math.inf)
            leases = backlog.next_leases(teacher, self._batch_sizes[teacher], tokens)
            if not leases:
                return
            batches = [batch for lease in leases for batch in lease.batches]
            scored = await pool.score(Batch.join(batches))
            self._group.create_task(self._put_and_ack(teacher, backlog, scored, leases))

    async def _put_and_ack(
        self, teacher: str, backlog: ScoreBacklog, scored: ScoreResult, leases: Sequence[Lease]
    ) -> None:
        await self._put(teacher, scored)
        for lease in leases:
            with suppress(LeaseExpired):  # its rollouts are scored again, as in ``_next``
                await self._leases.ack(rollouts_topic(teacher), lease.id)
        await backlog.mark_queued(teacher, sum(len(lease) for lease in leases))

    async def generate(
        self, teacher: str, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """The teacher's own answers, from one of its replicas."""
        return await self._calls.run(self._generate(teacher, prompts, sampling))

    async def _generate(
        self, teacher: str, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        pool = self._pools[teacher]
        if teacher not in self._hosts:
            return await pool.generate(prompts, sampling)
        answer: asyncio.Future[list[Rollout]] = asyncio.get_running_loop().create_future()

        async def request() -> None:
            try:
                found = await pool.generate(prompts, sampling)
            except Exception as error:
                if not answer.done():
                    answer.set_exception(error)
                return
            if not answer.done():  # the caller was cancelled
                answer.set_result(found)

        await self._backlogs[self._hosts[teacher]].add_request(teacher, request)
        return await answer

    async def load(self, teacher: str, weights: TeacherWeights) -> None:
        """Loads new weights into all replicas of a teacher."""
        await self._calls.run(self._pools[teacher].slots.load(weights))

    async def events(self, seen: int, wait: bool = True) -> Events:
        """Events of all replicas; see TeacherScorer.events."""
        return await self._event_log.after(seen, wait)

    async def progress(self) -> Progress:
        """The tokens of all calls to replicas that succeeded since the start."""
        return Progress(sum(pool.slots.tokens for pool in self._pools.values()))

    async def report(self) -> dict[str, StageReport]:
        """One report per teacher. An idle one whose samples are being put waits for the queue."""
        reports = await gather_or_cancel(*(pool.report() for pool in self._pools.values()))
        found: dict[str, StageReport] = {}
        for name, report in zip(self._pools, reports, strict=True):
            waits = ROOM if report.waits_for == IDLE and self._putting[name] else report.waits_for
            counters = {**report.counters, "put_s": self._put_s.pop(name, 0.0)}
            spans = (*report.spans, *self._leases.taken(rollouts_topic(name)))
            found[name] = replace(report, waits_for=waits, counters=counters, spans=spans)
        return found

    async def hand_over(
        self,
    ) -> tuple[dict[str, list[ScoringReplica | None]], RebuildTeacher | None]:
        """Stops scoring. Returns the current replicas, and the object that ends rebuilt ones.

        A scoring phase ends, and its teachers sleep, because their hosts will wake up.
        """
        await self._calls.stop(self._work)
        await self.rest()
        found = {name: pool.slots.replicas for name, pool in self._pools.items()}
        for replica in chain.from_iterable(found.values()):
            if isinstance(replica, EndpointClient):
                await replica.close()
        return found, self._rebuild

    async def rest(self) -> None:
        """Puts all colocated teachers to sleep, and ends the replicas that do not go to sleep."""
        await gather_or_cancel(*(self._pools[name].slots.rest() for name in self._hosts))

    async def shutdown(self) -> None:
        """Stops scoring, and ends the replicas that were rebuilt."""
        await self._calls.stop(self._work)
        if self._rebuild is not None:
            await self._rebuild.close()


def _pools(
    teachers: Mapping[str, Sequence[ScoringReplica | None]],
    health: Mapping[str, Health],
    rebuild: RebuildTeacher | None,
    supervision: SupervisionConfig | None,
    asleep: Collection[str],
    start_s: float,
    episodes: EpisodeBounds | None,
) -> dict[str, TeacherPool]:
    """A pool per teacher; the replicas of the teachers in ``asleep`` sleep now."""
    pools: dict[str, TeacherPool] = {}
    for name, replicas in teachers.items():
        given = (name, replicas, health.get(name, HealthConfig()), rebuild, supervision)
        slots = ReplicaSlots(*given, asleep=name in asleep, start_s=start_s)
        pools[name] = TeacherPool(slots, episodes)
    return pools
