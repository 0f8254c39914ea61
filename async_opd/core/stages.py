"""The Protocols between the pipeline and its stages.

    prompts ──admit──► Rollouter ──rollouts──► TeacherScorer ──scored──► Trainer
               ▲           ▲        (queue)                   (queue)       │
               └─ version ─┴───────────── weight sync ──────────────────────┘

``pipeline.py`` knows only these. Plain classes implement them (in one process, for tests) and so
do the Ray proxies in ``async_opd.cluster``. Every message is frozen and small, except the queue's.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from async_opd.core.batch import Batch
from async_opd.core.lease import Ack, Lease, TopicStats
from async_opd.core.liveness import Progress
from async_opd.core.samples import DeadLetter, Header, Prompt, Rollout
from async_opd.core.uid import Uid

TRAINER = "trainer"
"""The trainer's name, in errors; of several ranks the first one's."""
SCORED = "scored"
PROMPTS = "prompts"
"""Groups that are admitted and wait for a free slot on any replica."""
DEAD = "dead"
"""Headers of rollouts that nobody could sample, grade or score, with the reason."""
STALE = "stale"
"""Headers of scored samples that came too late to be trained: their prompts run again."""


def rollouts_topic(teacher: str) -> str:
    """The topic of rollouts that wait for one teacher, and for no other."""
    return f"rollouts/{teacher}"


def topics(teachers: Iterable[str]) -> tuple[str, ...]:
    """Every topic of a run."""
    return (PROMPTS, *(rollouts_topic(name) for name in teachers), SCORED, STALE, DEAD)


class Queue(Protocol):
    """Topics of batches between two stages, bounded by samples and by bytes."""

    async def put(self, topic: str, batch: Batch) -> None:
        """Appends a batch; waits for room. Raises QueueClosed."""

    async def get(
        self,
        topic: str,
        at_most: int,
        at_least: int = 1,
        ack: Ack = None,
        consumer: str = "",
        share: bool = False,
        tokens: int | None = None,
    ) -> Lease:
        """Waits for ``at_least`` samples and takes up to ``at_most``; acknowledges ``ack`` first.

        Of large samples it takes one message (``async_opd.core.batch``), be they fewer or not.
        ``share``: no more than an even share of what is there among all who wait for it;
        ``tokens``: no more than so many, or one sample.
        Raises QueueClosed or LeaseExpired.
        """
        ...

    async def ack(self, topic: str, lease_id: int) -> None:
        """The lease's samples are done with. Raises LeaseExpired."""

    async def renew(self, leases: Mapping[str, Sequence[int]]) -> float:
        """Whoever holds these lives. Seconds after which leases that are not renewed expire."""
        ...

    async def nack(self, topic: str, lease_id: int) -> bool:
        """The lease's samples go back to the front of the topic."""
        ...

    async def headers(self, topic: str) -> tuple[Header, ...]:
        """Of what the topic holds, leased or ready."""
        ...

    async def contents(self, topic: str, uids: Collection[Uid]) -> tuple[Batch, ...]:
        """What the topic holds of these samples, leased or ready; it stays there."""
        ...

    async def release(self, topic: str, consumer: str) -> int:
        """All leases of a consumer that died go back; the number of samples."""
        ...

    async def stats(self) -> dict[str, TopicStats]:
        """Counts of every topic."""
        ...

    async def events(self, seen: int, wait: bool = True) -> Events:
        """Leases that expired, after the line ``seen``; waits until there is one."""
        ...


@dataclass(frozen=True)
class SamplingSpec:
    """How to sample a response; ``temperature`` 0 is greedy, ``top_k`` and ``min_p`` 0 are off."""

    max_tokens: int
    temperature: float
    top_p: float
    n: int
    top_k: int = 0
    min_p: float = 0.0


@dataclass(frozen=True)
class Interval:
    """A pool was busy from ``start`` to ``end`` (seconds since the epoch) doing ``what``."""

    what: str
    start: float
    end: float


@dataclass(frozen=True)
class StageReport:
    """What a stage did since its last report.

    ``counters`` are sums since the last report, ``gauges`` the values now, ``busy`` the intervals
    in which the pool computed, ``waits_for`` what it waits for now ('' if it computes).
    """

    counters: Mapping[str, float] = field(default_factory=dict)
    gauges: Mapping[str, float] = field(default_factory=dict)
    busy: tuple[Interval, ...] = ()
    waits_for: str = ""


@dataclass(frozen=True)
class Events:
    """Lines for people; ``seen`` is what to ask with for those that come after."""

    seen: int
    lines: tuple[str, ...]


@dataclass(frozen=True)
class StepReport:
    """One optimizer step.

    ``trained`` are the headers of the batch, ``staleness`` each sample's, in weight versions;
    ``requeued`` is the number of samples that were too old for it and went back; ``skipped`` says
    why nothing was learned from the batch, if that is so.
    """

    step: int
    trained: tuple[Header, ...]
    staleness: tuple[int, ...]
    metrics: Mapping[str, float]
    requeued: int = 0
    skipped: str = ""


@dataclass(frozen=True)
class Captured:
    """A copy of the trainer's state is taken, after ``step`` steps.

    ``trained`` and ``skipped`` are that last step's, as in its report: who did not hear of it
    learns it here.
    """

    step: int
    trained: tuple[Header, ...]
    skipped: str = ""


@dataclass(frozen=True)
class SyncReport:
    """One weight sync: the new version, bytes sent to each replica, seconds of each part."""

    version: int
    nbytes: int
    metrics: Mapping[str, float]


class Rollouter(Protocol):
    """Moves groups from topic ``prompts`` through the student to ``rollouts/<teacher>``."""

    async def run(self) -> None:
        """Works until cancelled; raises StageError when a replica fails."""

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Rollouts for evaluation, returned and not queued, in the order of the prompts."""
        ...

    async def progress(self) -> Progress:
        """The tokens that its replicas have computed: a sign of life."""
        ...

    async def report(self) -> StageReport:
        """What happened since the last report."""
        ...


class TeacherScorer(Protocol):
    """Moves rollouts from ``rollouts/<teacher>`` through their teachers to ``scored``."""

    async def run(self) -> None:
        """Works until cancelled; raises StageError when a replica fails."""

    async def generate(
        self, teacher: str, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """What the teacher itself answers: the yardstick of the evaluation."""
        ...

    async def progress(self) -> Progress:
        """The tokens of what was scored: a sign of life."""
        ...

    async def events(self, seen: int, wait: bool = True) -> Events:
        """What became of replicas after the line ``seen``; waits until there is something."""
        ...

    async def report(self) -> dict[str, StageReport]:
        """One report per teacher."""
        ...


class Trainer(Protocol):
    """Takes batches from topic ``scored`` and moves the student towards its teachers."""

    async def step(self) -> StepReport:
        """Waits for one batch, trains on it, acknowledges it."""
        ...

    async def drop(self, lost: Uid, others: Sequence[Uid] = ()) -> bool:
        """Whether a sample that was lost, and others of its group, will never be trained.

        False if there was a copy of it, which the trainer has: held, taken for a step, or trained.
        Otherwise those held are let go, and those on their way as they come.
        """
        ...

    async def save(self, directory: str) -> None:
        """Writes the student in Hugging Face format."""

    async def capture(self) -> Captured:
        """Copies its state, after the step that is being computed; then training may go on."""
        ...

    async def checkpoint(self, directory: str, in_flight: frozenset[Uid]) -> None:
        """Writes what was captured last, and of the samples ``in_flight`` those that are scored.

        Training goes on meanwhile. Raises CheckpointError.
        """

    async def restore(self, directory: str) -> frozenset[Uid]:
        """Goes on from a checkpoint; the uids of the samples that need no rollout any more.

        Raises CheckpointError.
        """
        ...

    async def progress(self) -> Progress:
        """The tokens that it has trained on: a sign of life."""
        ...

    async def report(self) -> StageReport:
        """What happened since the last report."""
        ...


class WeightSync(Protocol):
    """Carries the trainer's weights to every rollout replica."""

    async def snapshot(self, version: int, again: bool = False) -> None:
        """Copies the weights out; training may go on when this returns.

        ``again``: the run goes on from a checkpoint with this version, or from the start (0).
        """

    async def push(self) -> SyncReport:
        """All replicas generate with the snapshot when this returns. Raises WeightSyncError."""
        ...


class Stages(Protocol):
    """The boxes of the diagram."""

    @property
    def queue(self) -> Queue: ...
    @property
    def rollouter(self) -> Rollouter: ...
    @property
    def scorer(self) -> TeacherScorer: ...
    @property
    def trainer(self) -> Trainer: ...
    @property
    def sync(self) -> WeightSync: ...

    async def supervise(
        self, reissue: Callable[[], Coroutine[Any, Any, None]], step: Callable[[], int]
    ) -> None:
        """Restarts single stages that die, and calls ``reissue`` after the queue lost everything.

        Works until cancelled; raises the error of one that was restarted too often. ``step()`` is
        the last one trained.
        """


class Log(Protocol):
    """Where metrics go."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def summarize(self, metrics: Mapping[str, float]) -> None: ...
    def waits(self, waits: Mapping[str, str]) -> None: ...
    def busy(self, pools: Mapping[str, Sequence[Interval]]) -> None: ...
    def message(self, text: str) -> None: ...
    def dead_letter(self, lost: DeadLetter) -> None: ...
