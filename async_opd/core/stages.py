"""The Protocols between the pipeline and its stages.

    prompts ──admit──► Rollouter ──rollouts──► TeacherScorer ──scored──► Trainer
               ▲           ▲        (queue)                   (queue)       │
               └─ version ─┴───────────── weight sync ──────────────────────┘

``pipeline.py`` imports only these Protocols. Plain classes implement them (in one process, for
tests), and so do the Ray proxies in ``async_opd.cluster``. Messages are frozen, and small except
the queue's batches.
A ``Lease`` has leased samples of a topic, and the topic's counts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from async_opd.core.batch import Batch, PayloadStore, unpack
from async_opd.core.reports import (
    Captured,
    Events,
    Interval,
    Level,
    Progress,
    StageReport,
    StepReport,
    SyncReport,
    WrittenFile,
)
from async_opd.core.samples import DeadLetter, Group, Header, Prompt, Rollout, Sample
from async_opd.core.uid import Uid

TRAINER = "trainer"
"""The trainer's name, in errors; of several ranks the first one's."""
LOG = "log"
"""The name, in errors, of a file of the run's record that cannot be written."""
SCORED = "scored"
PROMPTS = "prompts"
"""Admitted groups that wait for a free slot on any replica."""
DEAD = "dead"
"""Dead letters: headers of rollouts that could not be sampled, graded or scored, with reasons."""
STALE = "stale"
"""Headers of scored samples that are too stale to be trained: their prompts are sampled again."""

Item = TypeVar("Item", Group, Rollout, Sample, DeadLetter)
Ack = int | tuple[int, ...] | None
"""Leases to acknowledge."""


@dataclass(frozen=True)
class Lease:
    """Batches taken from a topic, which go back to it unless renewed or acknowledged in time.

    Of a lease of headers they have no payloads, which the topic keeps (``Queue.fetch``).
    """

    id: int
    batches: tuple[Batch, ...]

    def __len__(self) -> int:
        return sum(len(batch) for batch in self.batches)

    def items(self, kind: type[Item]) -> list[Item]:
        """The items of all batches, which are of this kind."""
        return unpack(kind, self.batches)

    @property
    def nbytes(self) -> int:
        """Bytes of all payloads."""
        return sum(batch.nbytes for batch in self.batches)

    @property
    def tokens(self) -> int:
        """Tokens of all samples."""
        return sum(batch.tokens for batch in self.batches)


@dataclass(frozen=True)
class TopicStats:
    """A topic now, and its totals since the start (samples; bytes).

    ``spilled`` are the bytes that nodes with stored payloads have written to their disks since
    their first store started: of topic ``scored`` in a run with such payloads.
    """

    ready: int
    leased: int
    nbytes: int
    put: int
    acked: int
    returned: int
    expired: int
    waiting_producers: int
    waiting_consumers: int
    spilled: int | None = None


@dataclass(frozen=True)
class MediaStats:
    """Images that the queue holds now, and bytes that came in and went out since its start."""

    images: int = 0
    nbytes: int = 0
    added_bytes: int = 0
    fetched_bytes: int = 0


def rollouts_topic(teacher: str) -> str:
    """The topic of the rollouts that wait for one teacher."""
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
        payloads: bool = True,
    ) -> Lease:
        """Waits for ``at_least`` samples and takes up to ``at_most``; acknowledges ``ack`` first.

        The lease has at most one message's bytes (``async_opd.core.batch``), even if these are
        fewer samples than ``at_least``; with ``share`` at most an even share of the ready samples
        among all waiting consumers; at most ``tokens`` tokens, or one sample. Without ``payloads``
        it has headers alone, of samples of any size.
        Raises QueueClosed or LeaseExpired.
        """
        ...

    async def fetch(self, topic: str, leased: Mapping[int, Sequence[Uid]]) -> Batch:
        """The samples of these uids, by their leases; they stay leased. Raises NotLeased."""
        ...

    async def ack(self, topic: str, lease_id: int) -> None:
        """Removes the lease's samples from the topic. Raises LeaseExpired."""

    async def renew(self, leases: Mapping[str, Sequence[int]]) -> float:
        """Renews leases. Returns the seconds after which a lease expires that is not renewed."""
        ...

    async def headers(self, topic: str) -> tuple[Header, ...]:
        """The headers of the topic's samples, leased or ready."""
        ...

    async def contents(self, topic: str, uids: Collection[Uid]) -> tuple[Batch, ...]:
        """The topic's samples of these uids, leased or ready; they stay there."""
        ...

    async def score_again(self, topic: str, lost: Collection[int]) -> None:
        """Samples whose stored payloads, by number, are lost: their teachers get the rollouts.

        A lease that has one expires. Numbers that the topic does not have are ignored.
        """
        ...

    async def payload_store(self, node: str) -> PayloadStore:
        """The store of a node; it is started if there is none, or if it has died."""
        ...

    async def keep_media(
        self,
        owned: Mapping[str, Sequence[str]],
        complete: bool = False,
        encoded: Mapping[str, bytes] | None = None,
    ) -> tuple[str, ...]:
        """Each owner, such as a prompt's uid, keeps images by their SHA-256 until ``drop_media``.

        Returns the hashes whose bytes the queue lacks: the next call brings them in ``encoded``.
        ``complete``: now the images are kept of all that is in flight.
        StageError for bytes with another SHA-256.
        """
        ...

    async def media(self, hashes: Sequence[str]) -> dict[str, bytes]:
        """Encoded bytes by SHA-256, without images that have no owner (``MediaCache`` fetches so).

        It waits for those that the driver has still to put again after a restart of the queue.
        """
        ...

    async def drop_media(self, owners: Sequence[str]) -> None:
        """These owners need their images no more."""

    async def media_stats(self) -> MediaStats:
        """Counts of the images."""
        ...

    async def release(self, topic: str, consumer: str) -> int:
        """Puts back all leases of a consumer that died. Returns the number of samples."""
        ...

    async def stats(self) -> dict[str, TopicStats]:
        """Counts of every topic."""
        ...

    async def events(self, seen: int, wait: bool = True) -> Events:
        """Messages on expired leases after number ``seen``; with ``wait`` at least one."""
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


class Rollouter(Protocol):
    """Moves groups from topic ``prompts`` through the student to ``rollouts/<teacher>``."""

    async def run(self) -> None:
        """Works until cancelled; raises StageError when a replica fails."""

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Rollouts for evaluation, returned and not queued, in the order of the prompts."""
        ...

    async def progress(self) -> Progress:
        """The tokens that the replicas have computed."""
        ...

    async def events(self, seen: int, wait: bool = True) -> Events:
        """Events of replicas after the line ``seen``; waits until there is one."""
        ...

    async def report(self) -> StageReport:
        """The work since the last report."""
        ...


class TeacherScorer(Protocol):
    """Moves rollouts from ``rollouts/<teacher>`` through their teachers to ``scored``."""

    async def run(self) -> None:
        """Works until cancelled; raises StageError when a replica fails."""

    async def generate(
        self, teacher: str, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]:
        """The teacher's own answers, with which an evaluation compares the student's."""
        ...

    async def progress(self) -> Progress:
        """The tokens of all samples that were scored."""
        ...

    async def events(self, seen: int, wait: bool = True) -> Events:
        """Messages on teacher replicas after number ``seen``; with ``wait`` at least one."""
        ...

    async def report(self) -> dict[str, StageReport]:
        """One report per teacher."""
        ...


class Trainer(Protocol):
    """Takes batches from topic ``scored`` and moves the student towards its teachers."""

    async def step(self) -> StepReport:
        """Waits for one batch, trains on it and acknowledges it."""
        ...

    async def drop(self, lost: Uid, others: Sequence[Uid] = ()) -> bool:
        """Whether a dead-lettered sample, and ``others`` of its group, will never be trained.

        False if the trainer has a copy of it: held, taken for a step, or trained. Otherwise it
        drops the others: those that it holds now, those still in the queue when they come.
        """
        ...

    async def save(self, directory: str) -> None:
        """Writes the student in Hugging Face format."""

    async def capture(self) -> Captured:
        """Copies the trainer's state after the current step; training may go on when it returns.

        CheckpointError while the copy of a checkpoint that was given up is still being written.
        """
        ...

    async def checkpoint(
        self, directory: str, in_flight: frozenset[Uid]
    ) -> Mapping[str, WrittenFile]:
        """Writes the last captured state, and the scored ones of the samples ``in_flight``.

        Returns its files in the directory; each is flushed to the disk by the process that wrote
        it. Training goes on meanwhile. Raises CheckpointError.
        """
        ...

    async def restore(self, directory: str) -> frozenset[Uid]:
        """Loads a checkpoint. Returns the uids of its samples, which need no new rollout.

        Raises CheckpointError.
        """
        ...

    async def adopt(self, directory: str, step: int, version: int) -> None:
        """Takes a directory's weights as those after a step. The optimizer stays as it is.

        Raises StageError.
        """

    async def supervise(self, batches: Sequence[Batch], rate: float) -> dict[str, float]:
        """One step on the cross entropy of samples' responses, at this learning rate.

        It is none of the run's steps. ``loss`` is the mean over response tokens, in nats. Raises
        StageError.
        """
        ...

    async def forget_moments(self) -> None:
        """Resets the optimizer, so that the first step is as that of a new one."""

    async def scale_learning_rate(self, factor: float) -> None:
        """Multiplies the learning rates of all later steps, those of a restored trainer too."""

    async def progress(self) -> Progress:
        """The tokens that the trainer has trained on."""
        ...

    async def report(self) -> StageReport:
        """The work since the last report."""
        ...


class WeightSync(Protocol):
    """Carries the trainer's weights to every rollout replica."""

    async def snapshot(self, version: int, again: bool = False) -> None:
        """Copies the weights out as ``version``; training may go on when this returns.

        ``again``: the run resumes from a checkpoint of this version, or from the start (0).
        """

    async def push(self) -> SyncReport:
        """All replicas generate with the snapshot when this returns. Raises WeightSyncError."""
        ...


class Stages(Protocol):
    """The stages of the diagram."""

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
        """Restarts stages that die, and calls ``reissue`` after a restart emptied the queue.

        Works until cancelled; raises the error of a stage that was restarted too often. ``step()``
        is the last trained step.
        """


class Log(Protocol):
    """The record of a run; see ``observability.run_log.RunLog``."""

    @property
    def last(self) -> Mapping[str, float]:
        """The last value of every metric, those before a resume included."""
        ...

    def log(self, step: int, metrics: Mapping[str, float]) -> None: ...
    def summarize(self, metrics: Mapping[str, float]) -> None: ...
    def waits(self, waits: Mapping[str, str]) -> None: ...
    def busy(self, pools: Mapping[str, Sequence[Interval]]) -> None: ...
    def message(self, text: str, level: Level = "info") -> None: ...
    def dead_letter(self, letter: DeadLetter) -> None: ...
