"""Computes kept steps again, from a checkpoint on: runs in rank 0's process, as the stage does.

checkpoint ──restore──► learner ◄──samples of all ranks── files of a step
                           └──► its results, and each rank's weights
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ParamSpec, TypeVar

import numpy as np

from async_opd.core.errors import CheckpointError
from async_opd.core.reports import Progress
from async_opd.core.stages import TRAINER
from async_opd.files.foreign import ForeignPath
from trainer.rank_group import SINGLE_RANK, RankGroup, run_with_ranks
from trainer.replay.keeper import Weights
from trainer.replay.kept_step import KeptStep, quantities_of, read_kept
from trainer.work_thread import WorkThread

if TYPE_CHECKING:
    from trainer.learner import Learner

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class DifferentWeights:
    """Of one rank: ``count`` tensors, of ``total``, have other bits than after the kept step.

    ``largest`` is the greatest difference of the compared entries of the ``first`` one; NaN if one
    of these is, or if the step before had no such tensor.
    """

    rank: int
    count: int
    total: int
    first: str
    largest: float


@dataclass(frozen=True)
class Recomputed:
    """A step that was computed again: its ``quantities`` as in StepResult.

    ``kernels``: of each rank, as in Record.
    """

    step: int
    quantities: dict[str, str]
    skipped: str
    weights: tuple[DifferentWeights, ...]
    kernels: tuple[dict[str, str], ...]


class Replayer:
    """Owns the learner of a run that is over, on as many ranks as the run had."""

    def __init__(
        self, learner: Learner, rank_group: RankGroup = SINGLE_RANK, offloaded: bool = False
    ) -> None:
        """``offloaded``: the learner is in host memory, as on GPUs that it shared with engines."""
        self._learner, self._rank_group = learner, rank_group
        self._computing = WorkThread("replay")
        self._offloaded = offloaded

    async def start(self, folder: str | None) -> list[dict[str, str]]:
        """Takes the state of a checkpoint, or that of the student's files; each rank's platform."""
        if self._offloaded:
            await self._compute(self._learner.onload)
        if folder is not None:
            await self._compute(self._learner.restore, folder)
        return await self._compute(self._learner.compared, "platform")

    async def step(self, paths: Sequence[ForeignPath]) -> Recomputed:
        """Computes the next step from its files, one of each rank, in order. CheckpointError."""
        kept = await asyncio.to_thread(lambda: [read_kept(path) for path in paths])
        return await self._compute(self._again, kept)

    async def progress(self) -> Progress:
        """Tokens that rank 0 has computed."""
        return Progress(self._learner.computed_tokens)

    def _again(self, kept: Sequence[KeptStep]) -> Recomputed:
        result, learner = kept[0].record.result, self._learner
        learner.lr_factor = result.lr_factor
        learner.version, learner.unchanged = kept[0].record.version, result.unchanged
        found = {one.rollout.uid: one for step in kept for one in step.samples}
        samples = {i: found[h.uid] for i, h in enumerate(result.headers) if h.uid in found}
        plan = learner.plan(result.headers)
        needed = {i for own in plan.micro_batches for one in own for i in one.indices}
        if missing := [result.headers[i].uid for i in sorted(needed - samples.keys())]:
            cause = f"the files of step {result.step} lack {len(missing)} samples: {missing[:5]}"
            raise CheckpointError(TRAINER, cause, "replay a step after the next checkpoint")
        report = learner.train_again(plan, samples)
        now = learner.compared("weight_digests")
        each = (different_weights(*one) for one in zip(kept, now, strict=True))
        different = tuple(one for one in each if one is not None)
        kernels = tuple(learner.compared("student.kernels"))
        quantities = quantities_of(report.metrics)
        return Recomputed(result.step, quantities, report.skipped, different, kernels)

    async def _compute(self, work: Callable[P, T], *args: P.args, **named: P.kwargs) -> T:
        return await run_with_ranks(self._rank_group, self._computing.run(work, *args, **named))


def different_weights(kept: KeptStep, now: Weights) -> DifferentWeights | None:
    """How a rank's weights differ from those of the kept step; None if all bits are equal."""
    before = kept.record.digests
    names = [n for n in now.digests | before if now.digests.get(n) != before.get(n)]
    if not names:
        return None
    first = names[0]
    rows = [list(one).index(first) if first in one else None for one in (before, now.digests)]
    largest = float("nan")
    if None not in rows:
        was, is_ = kept.entries[rows[0]], now.entries[rows[1]]
        largest = float(np.abs(was.astype(np.float64) - is_).max())
    return DifferentWeights(kept.record.rank, len(names), len(now.digests), first, largest)
