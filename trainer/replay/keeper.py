"""Keeps the steps of one rank on the disk (``log.replay``), beside training.

    step is applied ──digests──► at most 2 steps in memory ──thread──► replay/step_N.…
                                       │ more, a full disk             │ beyond the bound of bytes
                                       ▼                               ▼
                                 not kept, counted               the oldest are removed, counted

Training waits for the digests only (``replay/keep_s``). Nothing here ends a run: after an error no
further step is kept, ``run.log`` says why, and ``replay/lost`` counts on.

Beside a kept step a rank records its platform, and digests of its weights. A step has the same
bits only where all of the platform is the same. A few entries of each weight show how far off
another one is.

own shard of each parameter ──► digest, equal only for equal bits
                            └─► up to 16 of its entries, for the size of a difference
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from async_opd.core.distributions import cpu_name, installed
from async_opd.core.samples import Header, Sample
from async_opd.files.foreign import ForeignPath
from async_opd.files.kept_steps import KEPT, kept_files, kept_name
from async_opd.files.safe_open import make_folder
from async_opd.weight_sync.digests import Digests
from trainer.batches.micro_batches import MicroBatch
from trainer.replay.kept_step import KeptStep, Record, StepResult, quantities_of, write_kept
from trainer.vision.parts import attention_of

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig

PENDING = 2
"""Steps that may wait for the disk; each holds its samples in memory."""
LEFT_BYTES = 1 << 30
"""Free space of the disk that is left to checkpoints and logs, without which a run fails."""
SETTLE_S = 60.0
"""Seconds for which a checkpoint, or the end of the run, waits for the steps before it."""


@dataclass(frozen=True)
class Kept:
    """A rank's record of a trained step. ``fault``: why it does not keep it, else ''.

    ``ended``: nor will it keep later ones. ``nbytes`` of files it has, ``removed`` so many steps of
    them for the bound.
    """

    fault: str = ""
    ended: bool = False
    nbytes: int = 0
    removed: int = 0


class Keeper:
    """Writes the samples that one of ``ranks`` ranks computes, and what came of them."""

    def __init__(
        self,
        config: RunConfig,
        rank: int = 0,
        ranks: int = 1,
        platform: dict[str, str] | None = None,
    ) -> None:
        self._config = config
        self._tree = config.model_dump(mode="json", by_alias=True)
        self._rank, self._ranks, self._platform = rank, ranks, platform or {}
        self._run_dir = Path(config.run_dir or ".")
        self._most = int(config.log.replay_gib * (1 << 30)) // ranks
        # of ranks that share rows the first one has the same samples
        self._has_samples = rank % config.train.context_parallel == 0
        self._thread = ThreadPoolExecutor(1, "keep steps")
        self._pending: list[Future[None]] = []
        self._nbytes = self._removed = 0
        self._error = ""
        self.computed: Sequence[MicroBatch] = ()
        """Set by each backward pass."""

    def keep(self, model: Any, result: StepResult, kernels: Mapping[str, str]) -> Kept:
        """Takes the step whose weights the model has now. Raises nothing."""
        computed, self.computed = self.computed, ()
        self._pending = [one for one in self._pending if not one.done()]
        if self._error:
            return Kept(self._error, ended=True)
        if len(self._pending) >= PENDING:
            return Kept("the disk is slower than training", nbytes=self._nbytes)
        try:
            kept = self._kept(model, computed, result, kernels)
        except Exception as error:  # of any kind: training goes on
            self._error = f"{type(error).__name__}: {error}"
            return Kept(self._error, ended=True)
        self._pending.append(self._thread.submit(self._write, result.step, kept))
        return Kept(nbytes=self._nbytes, removed=self._removed)

    def settle(self) -> None:
        """Waits until all steps are written, at most ``SETTLE_S``."""
        wait(self._pending, SETTLE_S)

    def _kept(
        self,
        model: Any,
        computed: Sequence[MicroBatch],
        result: StepResult,
        kernels: Mapping[str, str],
    ) -> KeptStep:
        own: dict[str, Sample] = {}
        if self._has_samples:
            own = {sample.rollout.uid: sample for one in computed for sample in one.samples}
        weights = weights_of(model)
        record = Record(
            result,
            self._rank,
            self._ranks,
            self._config.version_after(result.step - 1),
            self._platform,
            weights.digests,
            self._tree,
            dict(kernels),
        )
        return KeptStep(record, tuple(own.values()), weights.entries)

    def _write(self, step: int, kept: KeptStep) -> None:
        """Runs on the thread. An error ends all keeping."""
        try:
            folder = self._run_dir / KEPT
            make_folder(folder)
            nbytes = sum(sample.nbytes for sample in kept.samples)
            free = shutil.disk_usage(folder).free - nbytes
            if free < LEFT_BYTES:
                raise OSError(f"{folder} would have {free >> 20} MiB of free space left")
            write_kept(folder / kept_name(step, self._rank, self._ranks), kept)
            self._bound()
        except Exception as error:  # of any kind: the run goes on without
            self._error = f"{type(error).__name__}: {error}"

    def _bound(self) -> None:
        """Removes the oldest of this rank's files beyond its bytes."""
        sizes: dict[ForeignPath, int] = {}
        for one in kept_files(self._run_dir):
            if (one.ranks, one.rank) == (self._ranks, self._rank):
                with suppress(FileNotFoundError):  # the driver has removed it meanwhile
                    sizes[one.path] = one.path.stat().st_size
        total = sum(sizes.values())
        for path, size in sizes.items():  # the oldest step first
            if total <= self._most:
                break
            path.remove()
            total, self._removed = total - size, self._removed + 1
        self._nbytes = total


class Keeping:
    """Rank 0's part: has all ranks keep each step, until one of them cannot."""

    def __init__(self, on_all_ranks: Callable[[StepResult], Sequence[Kept]]) -> None:
        self._on_all_ranks = on_all_ranks
        self._part = token_hex(8)
        self._lost = 0
        self._ended = False
        self._reported: set[str] = set()

    def keep(
        self,
        step: int,
        headers: Sequence[Header],
        metrics: Mapping[str, float],
        lr_factor: float,
        skipped: str,
        unchanged: bool = False,
    ) -> tuple[dict[str, float], tuple[str, ...]]:
        """Further metrics of the step, and lines for the run's log."""
        started = time.perf_counter()
        answers: Sequence[Kept] = ()
        if not self._ended:
            given = tuple(headers), quantities_of(metrics), lr_factor, skipped, unchanged
            answers = self._on_all_ranks(StepResult(step, self._part, *given))
        faults = {one.fault: one.ended for one in answers if one.fault}
        self._ended = self._ended or any(faults.values())
        self._lost += self._ended or bool(faults)
        new = {fault: ended for fault, ended in faults.items() if fault not in self._reported}
        self._reported |= new.keys()
        found = {"replay/lost": float(self._lost)}
        if answers:
            found["replay/keep_s"] = time.perf_counter() - started
            found["replay/gib"] = sum(one.nbytes for one in answers) / (1 << 30)
            found["replay/removed"] = float(max(one.removed for one in answers))
        return found, tuple(
            f"step {step} {'and all after it are' if ended else 'is'} not kept for replay: {fault}"
            for fault, ended in new.items()
        )


LIBRARIES = ("async-opd", "torch", "transformers", "peft", "torchao")
"""Other versions of these may compute the same bits, and may not."""


def platform_of(model: nn.Module, device: torch.device, reduces_once: bool) -> dict[str, str]:
    """Versions of the libraries that are installed, the device, and what was chosen for it."""
    gpu = device.type == "cuda"
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        **{name: has for name in LIBRARIES if (has := installed(name))},
        "device": torch.cuda.get_device_name(device) if gpu else f"{cpu_name()}, {capability}",
        "threads": str(torch.get_num_threads()),
        "attention": attention_of(model),
        "reduces gradients": "once a step" if reduces_once else "after each micro-batch",
    }


ENTRIES = 16
"""Numbers of each tensor whose values are kept, at even distances from its first one."""


@dataclass(frozen=True, eq=False)
class Weights:
    """Of one rank: the digest of each of its tensors by name (``weight_sync.digests``).

    ``entries`` float32 [tensors, ENTRIES] has some of their numbers, and zeros in place of those
    that a smaller tensor does not have.
    """

    digests: dict[str, str]
    entries: NDArray[np.float32]


def weights_of(model: Any) -> Weights:
    """Of what a checkpoint has of the model; of a sharded one this rank's part."""
    import torch

    from trainer.saving.state import stored_state
    from trainer.student.sharding import own_part

    digests = Digests(torch)
    entries = []
    for name, tensor in stored_state(model):
        own = own_part(tensor.detach())
        digests.add(name, own)
        flat = own.reshape(-1)
        some = flat[:: max(len(flat) // ENTRIES, 1)][:ENTRIES].float()
        entries.append(torch.nn.functional.pad(some, (0, ENTRIES - len(some))))
    together = torch.stack(entries).cpu().numpy() if entries else np.zeros((0, ENTRIES), np.float32)
    return Weights(digests.values(), together)
