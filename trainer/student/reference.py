"""The student's log-probabilities of held rows, and how much rounding changes them.

    rows ──Row──► logits of the student ──► log-probabilities
                  the same, every module's result times 1 ± JITTER ──► noise per relative error

The replicas' log-probabilities are compared with these (``async_opd.weight_sync.freshness``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from async_opd.core.arrays import Float32
from async_opd.weight_sync.held_rows import HeldRow, by_kind
from async_opd.weight_sync.layout import Reference
from trainer.batches.packing import Row
from trainer.layers.compiled import CompiledLayers
from trainer.vision.held import packed
from trainer.vision.images import Sight

JITTER = 2.0**-6
"""Relative error for measuring the noise: above the rounding of bfloat16, which would swallow a
smaller one, and small enough that log-probabilities change in proportion."""
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
"""Largest relative error of one rounding, by dtype."""


@dataclass(frozen=True)
class Jitter:
    """Multiplies tensors by 1 + e, with e uniform within ±JITTER from a separate generator."""

    generator: torch.Generator

    @classmethod
    def of(cls, device: torch.device) -> Jitter:
        """The same sequence of errors at each call: the random state of training is untouched."""
        return cls(torch.Generator(device).manual_seed(0))

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """A changed copy, in the tensor's dtype."""
        error = torch.empty(tensor.shape, device=tensor.device)
        error.uniform_(-JITTER, JITTER, generator=self.generator)
        return (tensor * (1 + error)).to(tensor.dtype)

    def hook(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        """A forward hook: changes a result that is one floating-point tensor."""
        if isinstance(output, torch.Tensor) and output.is_floating_point():
            return self(output)
        return None

    @contextmanager
    def within(self, modules: Iterator[torch.nn.Module]) -> Iterator[None]:
        """Changes the results of all modules without parts during the block."""
        leaves = [module for module in modules if not any(module.children())]
        handles = [module.register_forward_hook(self.hook) for module in leaves]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def reference_of(
    student: torch.nn.Module,
    logits_of: Callable[[Row], torch.Tensor],
    rows: Sequence[HeldRow],
    rounding: float,
    sight: Sight | None = None,
    layers: CompiledLayers | None = None,
) -> Reference:
    """Computes the rows twice. Of a sharded student a collective, which all ranks call.

    The second time with errors in the results of all modules, for which ``layers`` run eagerly.

    ``logits_of`` computes logits [T, V] with the student, in the dtype whose rounding is
    ``rounding``. ``sight`` is that of a VLM student.
    """
    started = time.perf_counter()
    row = packed(rows, sight)
    exact = logits_of(row)
    jitter = Jitter.of(exact.device)
    with layers.paused() if layers else nullcontext(), jitter.within(student.modules()):
        moved = jitter(logits_of(row))
    before, after = _logprobs(exact, row, rows), _logprobs(moved, row, rows)
    noise = {
        kind: float(np.concatenate([np.abs(after[at] - before[at]) for at in each]).mean()) / JITTER
        for kind, each in by_kind(rows).items()
    }
    return Reference(tuple(rows), tuple(before), noise, rounding, time.perf_counter() - started)


def _logprobs(logits: torch.Tensor, packed: Row, rows: Sequence[HeldRow]) -> list[Float32]:
    """Of each row's compared tokens, at temperature 1, in nats."""
    found = []
    lengths = packed.starts.diff().tolist()
    for one, row in zip(torch.split(logits, lengths), rows, strict=True):
        targets = torch.from_numpy(row.ids[-row.compared :]).long().to(logits.device)[:, None]
        predicting = one[-row.compared - 1 : -1].float()
        logprobs = predicting.log_softmax(-1).gather(1, targets)[:, 0]
        found.append(logprobs.cpu().numpy())
    return found
