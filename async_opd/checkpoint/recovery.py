"""The trainer goes on from the weights of a rollout replica, if no checkpoint is as new.

    every version     the driver notes the cut that belongs to it, replicas keep what they received
    the trainer dies  a replica writes the verified version ──digests as sent──► a folder
    it is restarted   trainer.adopt ──► a checkpoint of the noted cut ──► the run resumes from it

The ledger is that of the version: later samples are in flight, and are sampled again. Weights have
the dtype of the engines, the optimizer begins anew (docs/adr/0026-trainer-from-a-replica.md).
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from async_opd.accounting.lineage import begun_after
from async_opd.accounting.run_state import Cut
from async_opd.checkpoint.checkpointer import Checkpointer
from async_opd.checkpoint.store import Checkpoint
from async_opd.core.errors import ProcessDied, StageError
from async_opd.core.stages import TRAINER
from async_opd.waiting.deadline import in_thread

METRIC = "checkpoint/from_replica"


class VerifiedWeights(Protocol):
    """The rollout replicas' weights that were compared with the trainer's."""

    @property
    def verified_version(self) -> int | None: ...
    async def write_verified(self, directory: str) -> tuple[str, str]:
        """Writes them as a model's, to a folder below the directory. StageError.

        Returns the folder, and the name of the replica with their dtypes.
        """
        ...


@dataclass(frozen=True)
class Recovered:
    """The cut of ``weights``, which is a folder below ``folder``, and the replica that wrote it."""

    folder: Path
    cut: Cut
    weights: str
    replica: str


@dataclass(frozen=True)
class Recovery:
    """Takes the newest verified weights; ``notify`` gets what becomes of them."""

    checkpointer: Checkpointer
    weights: VerifiedWeights
    notify: Callable[[str], None]

    def __post_init__(self) -> None:
        """A run that is resumed may have been recovered before."""
        self._count()

    def _count(self) -> None:
        if count := sum(bool(one.replica) for one in self.checkpointer.lineage):
            self.checkpointer.metrics[METRIC] = float(count)

    async def fetch(self, newest: Checkpoint | None) -> Recovered | None:
        """Weights that are newer than the newest checkpoint; None, with a line, without any.

        Called before the stages are rebuilt, which forget the version.
        """
        version = self.weights.verified_version
        noted = self.checkpointer.noted
        cut = None if version is None else noted.get(version)
        if cut is None or (newest is not None and newest.cut.step >= cut.step):
            cuts = ", ".join(f"{one} (step {its.step})" for one, its in sorted(noted.items()))
            verified = "none" if version is None else version
            self.notify(
                f"the run goes on without a replica's weights: the verified version is {verified}, "
                f"versions with a cut are {cuts or 'none'}, the newest checkpoint is "
                f"{newest.folder.name if newest else 'none'}"
            )
            return None
        folder = None
        try:
            folder = await in_thread(self.checkpointer.store.begin, cut.step)
            return Recovered(folder, cut, *await self.weights.write_verified(str(folder)))
        except (OSError, StageError) as error:
            cause = error.cause if isinstance(error, StageError) else str(error)
            self.notify(f"no weights of version {version} for the trainer: {cause}")
            if folder is not None:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
            return None

    async def checkpoint(
        self, found: Recovered, newest: Callable[[], Awaitable[Checkpoint | None]]
    ) -> Checkpoint:
        """Gives the weights to the trainer, which was just built, and makes them a checkpoint.

        StageError if it does not take them, or that is not the newest checkpoint: the trainer may
        have a part of them.
        """
        made, cut, before = self.checkpointer, found.cut, self.checkpointer.lineage
        made.lineage = begun_after(cut.step, before, found.replica)
        try:
            await made.trainer.adopt(found.weights, cut.step, cut.version)
            await made.restart_at(cut)
            start = await newest()
            if start is None or start.cut.lineage != made.lineage:
                cause = f"that of step {cut.step} with its weights was not written: "
                cause += f"the newest checkpoint is {start.folder.name if start else 'none'}"
                raise ProcessDied(TRAINER, cause, "see run.log")
        except (OSError, StageError) as error:
            made.lineage = before
            with suppress(OSError):  # mostly there is none; it has sizes of files that change now
                self.notify(await in_thread(made.store.leave, cut.step))
            if isinstance(error, OSError):
                raise ProcessDied(TRAINER, str(error), "see run.log") from error
            raise
        finally:
            await asyncio.to_thread(shutil.rmtree, found.folder, ignore_errors=True)
        self._count()
        self.notify(
            f"the trainer has the weights of version {cut.version} from {found.replica}, and no "
            f"moments; the lineage after step {cut.step} is {made.lineage[-1].id}"
        )
        return start
