"""The checkpointer takes checkpoints while the run goes on.

    between two steps:  trainer.capture ──► cut of the driver's state ──┐ training goes on
    in the background:  trainer.checkpoint ──► commit ◄─────────────────┘

It writes one checkpoint at a time. A checkpoint that fails (a full disk) is counted and reported;
those before it stay as they are.

``state_s`` bounds a call that copies, writes or reads the trainer's whole state.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass, field, replace
from pathlib import Path

from async_opd.accounting.lineage import Lineage
from async_opd.accounting.run_state import Cut
from async_opd.checkpoint.evaluated import value_of
from async_opd.checkpoint.store import Checkpoints
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import CheckpointError, StageError, StageTimeout
from async_opd.core.reports import Captured, WrittenFile
from async_opd.core.stages import Trainer
from async_opd.models.model_size import ModelSize
from async_opd.waiting.deadline import Bound, Deadline, in_thread

STATE_BYTES = 12
"""Of each parameter: the float32 weight and AdamW's two moments. Neither a model that is exported
nor a state with adapters or smaller moments has more."""


def state_s(config: RunConfig) -> float:
    """Seconds: ``checkpoint.timeout_s`` and the time of the bytes of all ranks together.

    It reads the headers of the student's files. ModelError if they cannot be read.
    """
    size = ModelSize.read(Path(config.student.model))
    return config.checkpoint.bound_s(STATE_BYTES * size.floats)


@dataclass(eq=False)
class Checkpointer:
    """Takes checkpoints of ``trainer`` and the driver's state into ``store``.

    ``keep_best`` is ``checkpoint.keep_best``; ``config`` is the identity that a resumed run is
    compared with; ``notify`` gets a message about every checkpoint, ``written`` the step and
    the folder of every complete one; ``sizes()`` gives the sizes of
    the run directory's append-only files now, ``sync()`` flushes them to the disk. A checkpoint of
    the step ``evaluating()`` stays: its value is not known yet. ``lineage`` is that of the run now.
    ``noted``: see ``note`` and ``checkpoint.recovery``.
    """

    store: Checkpoints
    trainer: Trainer
    _: KW_ONLY
    config: str
    timeout_s: float
    keep_best: str | None = None
    notify: Callable[[str], None]
    written: Callable[[int, Path], None] = lambda step, folder: None
    sizes: Callable[[], dict[str, int]] = dict
    sync: Callable[[], None] = lambda: None
    evaluating: Callable[[], int | None] = lambda: None
    lineage: Lineage = ()
    clock: Callable[[], float] = time.perf_counter
    metrics: dict[str, float] = field(
        default_factory=lambda: {"checkpoint/failures": 0.0, "checkpoint/skipped": 0.0}
    )
    noted: dict[int, Cut] = field(default_factory=dict, init=False)
    _writing: asyncio.Task[None] | None = field(default=None, init=False)

    def note(self, cut: Cut) -> None:
        """Keeps the cut of a version in ``noted``, and that of the version before."""
        for version in self.noted.keys() - {cut.version - 1}:
            del self.noted[version]
        self.noted[cut.version] = replace(cut, files=self.sizes())

    async def restart_at(self, cut: Cut) -> None:
        """Writes the checkpoint of a noted cut, whose weights the trainer has adopted.

        It is that of a new lineage, the run's of now. One that fails is reported, as in ``take``.
        """
        copying = self.trainer.capture()
        await Deadline("checkpoint").within(self.timeout_s, "copying the state", copying)
        await self._write(replace(cut, lineage=self.lineage))

    async def take(self, cut_of: Callable[[Captured], Cut]) -> None:
        """Starts a checkpoint, and returns when the trainer's state and ``cut_of`` it are copied.

        Raises what the trainer or ``cut_of`` raise: then there is no consistent state to keep. With
        a CheckpointError of the trainer it is skipped, and counted.
        """
        # A slow disk delays no training: this checkpoint is skipped, and counted.
        if self._writing is not None and not self._writing.done():
            self.metrics["checkpoint/skipped"] += 1
            return
        started = self.clock()
        try:
            captured = await self.trainer.capture()
        except CheckpointError as error:  # it still writes one that was given up
            self.metrics["checkpoint/skipped"] += 1
            self.notify(f"a checkpoint is skipped: {error.cause}")
            return
        cut = replace(cut_of(captured), files=self.sizes(), lineage=self.lineage)
        self.metrics["checkpoint/capture_s"] = self.clock() - started
        self.metrics["checkpoint/gib"] = captured.nbytes / (1 << 30)
        self._writing = asyncio.create_task(self._write(cut), name=f"checkpoint {cut.step}")

    async def evaluated(self, step: int, metrics: Mapping[str, float]) -> None:
        """Notes what ``keep_best`` compares, of an evaluation of the weights after ``step``.

        A value that cannot be written is reported, and is not compared.
        """
        value = None if self.keep_best is None else value_of(self.keep_best, metrics)
        if value is None:
            return
        try:
            await in_thread(self.store.evaluated.add, step, value)
        except (OSError, CheckpointError) as error:
            self.notify(f"{self.keep_best} of step {step} is not compared: {error}")

    async def settled(self) -> None:
        """Waits until no checkpoint is being written."""
        if self._writing is not None:
            await asyncio.shield(self._writing)

    async def abandon(self, within_s: float) -> None:
        """Ends the writing of a checkpoint: it has become one when this returns, or never will.

        StageTimeout if the disk does not answer within ``within_s``.
        """
        if self._writing is None or self._writing.done():
            return
        self._writing.cancel()
        await asyncio.wait({self._writing}, timeout=within_s)
        if not self._writing.done():
            cause = f"a checkpoint is still being written {within_s:g} s after it was given up"
            remedy = "make sure that the run directory's disk answers, then --resume"
            raise StageTimeout("checkpoint", cause, remedy)
        self._writing = None

    async def _write(self, cut: Cut) -> None:
        started = self.clock()
        part: Path | None = None
        late = False
        try:
            async with Bound(self.timeout_s):
                part = await in_thread(self.store.begin, cut.step)
                in_flight = frozenset(cut.ledger.in_flight)
                files = await self.trainer.checkpoint(str(part), in_flight)
                folder = await in_thread(self._commit, part, cut, files)
        except Exception as error:  # of any kind: the run goes on
            # A commit that its timeout cancelled may have ended well: see ``in_thread``.
            with suppress(OSError):  # of the disk that is the cause
                late = cut.step in await asyncio.to_thread(self.store.steps)
            if late:
                self.notify(f"checkpoint of step {cut.step}, though: {str(error) or 'it was late'}")
                self._written(cut.step, self.store.folder / f"step_{cut.step}", started)
                return
            self.metrics["checkpoint/failures"] += 1
            cause = error.cause if isinstance(error, CheckpointError) else str(error)
            if not isinstance(error, OSError | StageError):
                cause = f"{type(error).__name__}: {error}"
            if isinstance(error, TimeoutError) and not cause:
                cause = f"it took longer than {self.timeout_s:g} s, for which checkpoint.timeout_s "
                cause += "and checkpoint.min_mib_per_s allow"
            self.notify(f"no checkpoint of step {cut.step}, the run goes on: {cause}")
            return
        finally:
            if part is not None:  # a checkpoint has another name now
                await asyncio.to_thread(shutil.rmtree, part, ignore_errors=True)
        self.notify(f"checkpoint of step {cut.step}: {folder}")
        self._written(cut.step, folder, started)

    def _written(self, step: int, folder: Path, started: float) -> None:
        self.metrics["checkpoint/write_s"] = self.clock() - started
        self.metrics["checkpoint/step"] = float(step)
        self.written(step, folder)

    def _commit(self, part: Path, cut: Cut, files: Mapping[str, WrittenFile]) -> Path:
        self.sync()
        return self.store.commit(part, cut, self.config, files, self.evaluating())
