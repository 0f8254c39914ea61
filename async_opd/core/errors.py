"""The exception tree. Every error says its cause, the values seen, and a remedy.

    AsyncOPDError
    ├── ConfigError        bad input, found before any engine starts      exit code 2
    ├── StageError         a replica, stage or actor failed or died       exit code 1
    │   ├── EngineStartError
    │   ├── WorkersFailed  a call failed in workers of an engine
    │   ├── ProcessDied
    │   │   └── ProcessRestarts
    │   ├── Displaced      the process lost its machine or its GPUs
    │   ├── HeadLost       Ray's head
    │   ├── WeightSyncError
    │   │   ├── TransferAborted
    │   │   ├── WrongWeights
    │   │   └── SyncTimeout   (also a StageTimeout)
    │   ├── LeaseExpired
    │   ├── NotLeased
    │   ├── NoReplica      a pool has no replica (left)
    │   ├── RolloutFault   a prompt or its grader fails, its process works on: a dead letter
    │   ├── CheckpointError
    │   └── StageTimeout   (also a TimeoutError)
    ├── QueueClosed        the topic was closed: no more samples will come
    ├── LengthError        a message whose arrays differ in length (also a ValueError)
    └── ScoreError         scores or log-probabilities that are not numbers (also a ValueError)

All of them are picklable: they cross process boundaries through Ray. ``Findings`` collects the
problems of one ConfigError.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self


class AsyncOPDError(Exception):
    """Root of every error that async_opd raises on purpose."""


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with the input.

    ``where`` names the file, ``key`` the dotted config key (empty if the problem is the file's),
    ``message`` what was found and expected, ``remedy`` what to do about it.
    """

    where: str
    key: str
    message: str
    remedy: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: {self.key}" if self.key else self.where
        return f"{place}: {self.message}" + (f"\n    → {self.remedy}" if self.remedy else "")


class ConfigError(AsyncOPDError):
    """All the problems of the input at once. ``after`` is a line behind them, for people."""

    def __init__(self, problems: list[Problem], after: str = "") -> None:
        super().__init__(problems, after)
        self.problems, self.after = problems, after

    @classmethod
    def of(cls, key: str, message: str, remedy: str, where: str = "command line") -> Self:
        """The error of a single problem, by default of an argument of the command."""
        return cls([Problem(where, key, message, remedy)])

    def __str__(self) -> str:
        count = len(self.problems)
        head = f"{count} problem{'s' if count != 1 else ''} with the input:"
        numbered = (f"  {number}. {p}" for number, p in enumerate(self.problems, 1))
        return "\n".join([head, *numbered, *filter(None, [self.after])])


class StageError(AsyncOPDError):
    """A stage of the pipeline failed; ``stage`` names it, ``cause`` says why."""

    def __init__(self, stage: str, cause: str, remedy: str = "") -> None:
        super().__init__(stage, cause, remedy)
        self.stage = stage
        self.cause = cause
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.stage}: {self.cause}" + (f"\n    → {self.remedy}" if self.remedy else "")


class EngineStartError(StageError):
    """An inference engine did not come up."""


class WeightSyncError(StageError):
    """New weights did not reach a rollout replica."""


class WorkersFailed(StageError):
    """A method failed in workers of an engine. ``faults``: each worker's error, "" if none."""

    def __init__(self, stage: str, method: str, faults: tuple[str, ...]) -> None:
        which: dict[str, list[str]] = {}
        for worker, fault in enumerate(faults):
            which.setdefault(fault, []).append(str(worker))
        found = (
            f"worker {', '.join(workers)}: {fault}" for fault, workers in which.items() if fault
        )
        super().__init__(stage, f"{method} failed in its engine: {'; '.join(found)}")
        self.args = (stage, method, faults)
        self.faults = faults


class ProcessDied(StageError):
    """The process of an actor died before it answered a call."""


class ProcessRestarts(ProcessDied):
    """The process of an actor died and Ray starts another one: the call can be made again."""


class Displaced(StageError):
    """A process lost its machine, or its GPUs to a more important one: it did not fail itself.

    No bound of restarts counts it.
    """


class HeadLost(StageError):
    """The head of the Ray cluster is lost: Ray ends the driver soon, and starts no process."""


class TransferAborted(WeightSyncError):
    """A transfer of weights broke off, for no fault of the replica that raises it.

    It has all of its old weights, or stays paused until another transfer has set all of them.
    """


class WrongWeights(WeightSyncError):
    """A rollout replica has other weights than the trainer sent, or computes with others."""


class LeaseExpired(StageError):
    """Samples were acknowledged after their lease had expired: another consumer may have them."""

    def __init__(self, topic: str, lease_id: int) -> None:
        super().__init__(
            f"topic {topic}",
            f"lease {lease_id} had expired before it was acknowledged: its holder did not renew it "
            "for queue.lease_s",
            "raise queue.lease_s above the longest time that the holder's event loop may block",
        )
        self.args = (topic, lease_id)


class NotLeased(StageError):
    """Samples were fetched under leases that do not have them; ``uids`` names them."""

    def __init__(self, topic: str, uids: tuple[str, ...]) -> None:
        some = ", ".join(uids[:3]) + (f" and {len(uids) - 3} more" if len(uids) > 3 else "")
        super().__init__(
            f"topic {topic}",
            f"{some} cannot be fetched: the lease has expired, was acknowledged, or is of a queue "
            "that died",
            "lease them again: expired ones are in the topic; raise queue.lease_s if this recurs",
        )
        self.args = (topic, uids)
        self.uids = uids


class NoReplica(StageError):
    """A pool with work has no replica left: waiting would never end."""


class RolloutFault(StageError):
    """One rollout cannot be sampled or graded; the replica works on.

    ``stage`` is prompt, student or grader.
    """


class GuardrailExceeded(StageError):
    """Responses exceed a limit of the guardrail after ``step``, and the run may not go on so."""

    def __init__(self, step: int, cause: str, remedy: str) -> None:
        super().__init__("guardrail", f"step {step}: {cause}", remedy)
        self.args = (step, cause, remedy)
        self.step = step
        self.found = cause


class CheckpointError(StageError):
    """A checkpoint could not be written, or differs from what was written."""


class StageTimeout(StageError, TimeoutError):
    """A wait reached its bound."""


class SyncTimeout(WeightSyncError, StageTimeout):
    """A part of a weight sync reached its bound."""


class QueueClosed(AsyncOPDError):
    """The topic was closed: nothing can be put, and nothing more will come."""


class LengthError(AsyncOPDError, ValueError):
    """A message whose arrays differ in length."""


class ScoreError(AsyncOPDError, ValueError):
    """Scores that hold NaN or an infinity that no distribution has."""


class SourceError(AsyncOPDError):
    """A data source that cannot be read. ``row`` is 1-based, or None for the whole source.

    ``others`` are errors of later rows.
    """

    def __init__(self, source: str, message: str, row: int | None = None, remedy: str = "") -> None:
        super().__init__(source, message, row, remedy)
        self.source, self.message, self.row, self.remedy = source, message, row, remedy
        self.others: list[SourceError] = []

    def __str__(self) -> str:
        return f"{self.source}{'' if self.row is None else f', row {self.row}'}: {self.message}"


class RowFault(ValueError):
    """A row that cannot be used, with what to do about it."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message, self.remedy = message, remedy

    def __str__(self) -> str:
        return self.message


def in_words(error: BaseException) -> str:
    """The error's text without the name of its class; that name where there is no text."""
    text = str(error)
    return f"{text} is missing" if isinstance(error, KeyError) else text or type(error).__name__


def first_cause(error: BaseException) -> BaseException:
    """The first real error inside of (nested) exception groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@dataclass(frozen=True)
class Findings:
    """Problems of one config, and notes about settings that are valid but may be unintended.

    ``where``: the file of the config. No note stops a run.
    """

    where: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, message: str, remedy: str, where: str | None = None) -> None:
        """Adds a problem of the config's key, or of a key in the file ``where``."""
        self.problems.append(Problem(where or self.where, key, message, remedy))

    def has(self, key: str) -> bool:
        """Whether there is a problem of this key."""
        return any(problem.key == key for problem in self.problems)
