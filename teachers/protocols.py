"""Protocols between a teacher's pool, its replicas and the code that rebuilds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from async_opd.core.batch import Batch
from async_opd.core.errors import Displaced
from async_opd.core.reports import StageReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.processes.members import Places


class ScoringReplica(Protocol):
    """The methods of a teacher replica that the pool needs."""

    async def score(self, batch: Batch) -> Batch: ...

    async def generate(
        self, prompts: Sequence[Prompt], sampling: SamplingSpec
    ) -> list[Rollout]: ...

    async def report(self) -> StageReport: ...

    async def ready(self) -> int: ...


class EngineReplica(ScoringReplica, Protocol):
    """A replica whose weights can change, and that can free its GPUs and take them back."""

    async def load(self, directory: str) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def kill(self) -> None:
        """Ends its process."""


@runtime_checkable
class EndpointClient(ScoringReplica, Protocol):
    """A replica that is a client of an external server."""

    async def close(self) -> None:
        """Closes its connections."""


@dataclass(frozen=True)
class TeacherWeights:
    """A version of the student's weights in a directory; ``timeout_s`` bounds loading it."""

    version: int
    directory: str
    timeout_s: float


class RebuildTeacher(Protocol):
    """Replaces replicas. ``async_opd.cluster`` implements it, since it can start processes."""

    async def __call__(self, teacher: str, index: int, old: Any) -> ScoringReplica:
        """Ends the old replica, if any, and starts another. Raises if either fails."""
        ...

    async def displaced(self, old: Any) -> Displaced | None:
        """The error of a replica that lost its machine or its GPUs; None of any other."""

    def places(self, teacher: str) -> Places | None:
        """The places of its replicas in the cluster; None where these stay on their machine."""

    async def close(self) -> None:
        """Ends every replica that this object started."""
