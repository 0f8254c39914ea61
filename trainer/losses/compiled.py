"""Runs an objective on tiles of logits: compiled into few kernels on a GPU, where that is faster.

    first tile ──copies──► eager, compiled ──► equal, and faster? ──yes──► compiled, whole chunks
                                                     └──no, or it fails──► eager, tile by tile

Neither the objective nor the compiler's kernels change with the number of rows: sizes are symbols
of one graph, which is compiled a few times at most (one row, and equal sizes, are special).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from trainer.losses.base import Tokens
from trainer.losses.objective import Objective
from trainer.losses.report import Metrics, concat_metrics
from trainer.notes import note

TILE_BYTES = {"cpu": 16 << 20, "cuda": 256 << 20}
"""Bytes of the logits that an objective works on at a time, not compiled: each of its operations
makes another tensor of that size. A CPU's cache holds it."""

MIN_TRIED_ROWS = 64
"""Of fewer rows the times would be those of launching kernels: they run eagerly until then."""

MAX_DIFFERENCE = 1e-3
"""Largest difference of the compiled gradient, relative to its largest entry."""

Compiled = Callable[[torch.Tensor, Tokens, torch.Tensor | None], Metrics]


def compiled(objective: Objective, backend: Any = "inductor") -> Compiled:
    """The objective as one graph for tiles of any number of rows but one, which has its own.

    Without duck shapes: torch would take sizes that are equal by chance for the same size, and
    compile again for each chance.
    """
    from torch.fx.experimental import _config

    form = torch.compile(objective.__call__, dynamic=True, fullgraph=True, backend=backend)

    def call(logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Metrics:
        with _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
            return form(logits, tokens, teacher)

    return call


def _seconds(call: Callable[[], Metrics]) -> float:
    """Seconds of a call on the GPU, which is waited for before and after."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


@dataclass
class ObjectiveRun:
    """An objective, and its compiled form where there is one.

    ``seconds`` measures a call, and all that it starts on the device.
    """

    objective: Objective
    compiled: Compiled | None = None
    seconds: Callable[[Callable[[], Metrics]], float] = _seconds
    _tried: bool = field(default=False, init=False)

    @classmethod
    def on(cls, objective: Objective, device: str) -> ObjectiveRun:
        """Compiled for a GPU only."""
        if device == "cpu":
            return cls(objective)
        return cls(objective, compiled(objective))

    def tile_rows(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> int:
        """Rows of a tile of this chunk; compiled, the chunk is one tile.

        The first call with enough rows tries the compiled form on copies of a tile, and keeps what
        is faster.
        """
        rows = _rows_of_a_tile(logits)
        if self.compiled is not None and not self._tried and len(logits) >= MIN_TRIED_ROWS:
            self._tried = True
            part = slice(0, rows)
            self._try(logits[part], tokens.part(part), None if teacher is None else teacher[part])
        return rows if self._chosen is None else max(len(logits), 1)

    def __call__(
        self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None = None
    ) -> Metrics:
        """See Objective.__call__."""
        if self._chosen is not None:
            try:
                return self._chosen(logits, tokens, teacher)
            except Exception as error:
                if not is_compile_error(error):  # a kernel: it may have overwritten the logits
                    raise
                self._fall_back(f"it cannot be compiled again: {summary(error)}")
        return self._eager(logits, tokens, teacher)

    def _eager(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> Metrics:
        """The objective itself, tile by tile: a chunk may be given that was to run compiled."""
        rows, reports = _rows_of_a_tile(logits), []
        for start in range(0, len(logits), rows):
            tile = slice(start, min(start + rows, len(logits)))
            given = logits[tile], tokens.part(tile), None if teacher is None else teacher[tile]
            reports.append(self.objective(*given))
        return concat_metrics(reports)

    @property
    def is_compiled(self) -> bool:
        """Whether chunks run compiled, by the last choice."""
        return self._chosen is not None

    @property
    def _chosen(self) -> Compiled | None:
        """The compiled form, once it was tried and kept."""
        return self.compiled if self._tried else None

    def _try(self, logits: torch.Tensor, tokens: Tokens, teacher: torch.Tensor | None) -> None:
        """Runs both forms twice, the first time to warm up; both overwrite what they are given."""
        assert self.compiled is not None
        found: list[tuple[float, torch.Tensor]] = []
        for run in (self.objective, self.compiled):
            try:
                for _ in range(2):
                    given = logits.clone(), tokens, None if teacher is None else teacher.clone()
                    took = self.seconds(partial(run, *given))
                found.append((took, given[0]))
            except torch.OutOfMemoryError:  # of the copies: compiled, it takes less memory
                note("the objective runs compiled: no memory was left to measure it")
                return
            except Exception as error:
                if run is self.objective:
                    raise
                self._fall_back(f"compiling failed: {summary(error)}")
                return
        (eager_s, exact), (compiled_s, gradient) = found
        largest = float(exact.abs().max())
        difference = float((gradient - exact).abs().max())
        times = f"{1000 * compiled_s:.3g} ms compiled, {1000 * eager_s:.3g} ms eager"
        if not difference <= MAX_DIFFERENCE * largest:
            self._fall_back(f"compiled, its gradient differs by {difference:.3g} of {largest:.3g}")
        elif compiled_s >= eager_s:
            self._fall_back(f"{len(logits)} rows take {times}")
        else:
            note(f"the objective runs compiled: {len(logits)} rows take {times}")

    def _fall_back(self, reason: str) -> None:
        self.compiled = None
        note(f"the objective runs eagerly, not compiled: {reason}")


def _rows_of_a_tile(logits: torch.Tensor) -> int:
    """Rows that the objective works on at a time, not compiled; at most all, and one for none."""
    row = logits.shape[-1] * logits.itemsize
    return min(max(TILE_BYTES[logits.device.type] // row, 1), max(len(logits), 1))


def is_compile_error(error: Exception) -> bool:
    """Whether the error arose before any kernel ran."""
    from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

    return isinstance(error, TorchDynamoException | FailOnRecompileLimitHit)


def summary(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"
