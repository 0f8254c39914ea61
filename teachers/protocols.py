"""What a pool needs of a teacher's replica, and of whoever replaces one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from async_opd.core.batch import Batch
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec, StageReport


class ScoringReplica(Protocol):
    """What the pool needs of a teacher replica."""

    async def score(self, batch: Batch) -> Batch: ...

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]: ...

    async def report(self) -> StageReport: ...

    async def ready(self) -> int: ...


@runtime_checkable
class Reloadable(ScoringReplica, Protocol):
    """A replica whose weights can change."""

    async def load(self, directory: str) -> None: ...


@runtime_checkable
class Sleepable(ScoringReplica, Protocol):
    """A replica that can leave its GPUs to others for a while."""

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...


@runtime_checkable
class EndpointClient(ScoringReplica, Protocol):
    """A replica that is a client of somebody else's server."""

    async def close(self) -> None:
        """Ends its connections."""


@dataclass(frozen=True)
class TeacherWeights:
    """A version of the student's weights in a directory, and how long taking them may take."""

    version: int
    directory: str
    timeout_s: float


class RebuildTeacher(Protocol):
    """Replaces replicas; given by who can start processes."""

    async def __call__(self, teacher: str, index: int, old: Any) -> ScoringReplica:
        """Ends the old replica for good and starts another. Raises when that fails."""
        ...

    async def close(self) -> None:
        """Ends every replica that was started here."""
