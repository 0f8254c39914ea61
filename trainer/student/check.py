"""Checks that packed rows, computed as in training, have the logits of the model itself.

    two sequences, one at the start, one at the end of the positions
        ├─ alone: whole model, eager attention, float32 ───────────────► exact ──┐ differ by
        ├─ packed: decoder, then head, float32 ──────────────────────────────────┤ rounding?
        └─ packed: every rank, sharded, its attention, as it trains ─────────────┘

Every rank does all of it. Of a sharded student the whole model gathers one block at a time
(``trainer.student.loading``).

In float32 rounding explains little. The path that trains may compute in bfloat16: then its packed
rows are compared with the same sequences alone, in bfloat16 on the same path but with eager
attention, and what bfloat16 changes in those is the measure of rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from async_opd.core.errors import StageError
from trainer.batches.packing import Row
from trainer.losses.chunked import shape_logits
from trainer.student.loss_module import UNSUPPORTED, DecoderAndHead, decoded_states
from trainer.vision.parts import attention_of, set_attention_of

if TYPE_CHECKING:
    from trainer.student.placed import PlacedStudent

LENGTHS = (5, 7)
MAX_RELATIVE_DIFFERENCE, MAX_DIFFERENCE = 1e-3, 0.1
"""Largest difference of logits in float32: relative to the largest logit (or 1), and absolute."""
MAX_MEAN_NATS, MAX_TIMES_ROUNDING = 0.05, 2.0
"""Largest mean difference of a row's log-probabilities in another precision: in nats, or as a
multiple of the difference that the precision itself makes for the same sequences alone."""
DEFAULT_POSITIONS = 4096
"""Positions of a model whose config has no max_position_embeddings."""
REPEATED = 20
"""Times the second sequence stands in the row of the path that trains: below 128 tokens torch's
flex attention is another kernel."""
ON_CPU = ("sdpa", "eager")
"""Attention implementations that compute on a CPU, and without the lengths of sequences."""


def check_student(model: Any, longest: int | None = None) -> torch.Tensor:
    """Compares two packed sequences (decoder, then head) with each alone through the whole model.

    In float32; packed rows in the model's current mode, with eager attention if the chosen one is
    a kernel for GPUs, which compute in 16 bits. ``longest``: tokens of the longest
    sequence of the engines, by default the model's positions. Returns the logits of both, alone.
    StageError if the logits differ: the architecture changes its logits after the head in an
    unknown way, lets packed sequences attend to each other (recurrent state), lets the longest one
    change the others (rotary factors), or computes something random. Each of these would train on
    wrong logits without an error. At most three forward passes of at most 12 tokens.
    """
    modules = DecoderAndHead.of(model)
    probe = _Probe.of(model, modules.linear.weight.shape[0], longest)
    chosen = attention_of(model)
    with torch.no_grad(), _refusing(model):
        with _attending(model, None if chosen in ON_CPU else "eager"):
            packed = probe.packed_logits(modules)
        with _attending(model, "eager"), _evaluating(model):
            alone = probe.logits_alone(model)
        _compare_logits(model, packed, alone)
    return alone


def check_placed(student: PlacedStudent, exact: torch.Tensor, longest: int | None = None) -> None:
    """Compares packed sequences on the path that trains with ``check_student``'s logits.

    A collective: every rank compares its own with its own ``exact``. StageError if they
    differ: packed sequences attend to each other there, the attention kernel differs from its eager
    definition, or a parameter is gathered wrongly. One forward pass of 145 tokens, and two short
    ones in bfloat16.
    """
    model, rows = student.model, student.vocabularies.student
    probe = _Probe.of(model, rows, longest)
    exact = exact.to(student.device)
    first, second = probe.sequences
    with _refusing(model):
        packed = student.logits(probe.row(first, *[second] * REPEATED)).float()
        if not student.half:
            _compare_logits(model, packed, _repeated(exact))
            return
        with _attending(model, "eager"):
            alone = torch.cat([student.logits(probe.row(one)).float() for one in (first, second)])
        _compare_rows(model, packed, _repeated(alone), _repeated(exact))


def _repeated(logits: torch.Tensor) -> torch.Tensor:
    """Logits of the first sequence and, ``REPEATED`` times, of the second."""
    return torch.cat([logits[: LENGTHS[0]], *[logits[LENGTHS[0] :]] * REPEATED])


@contextmanager
def _refusing(model: Any) -> Iterator[None]:
    """A StageError for what a model that cannot compute packed rows raises."""
    try:
        yield
    except (TypeError, AttributeError, NotImplementedError) as error:
        message = f"{type(model).__name__} cannot compute packed rows: {error}"
        raise StageError("trainer", message, UNSUPPORTED) from error


@dataclass(frozen=True)
class _Probe:
    """Two sequences: token ids and positions of each."""

    sequences: tuple[tuple[np.ndarray, np.ndarray], ...]

    @classmethod
    def of(cls, model: Any, rows: int, longest: int | None) -> _Probe:
        """Sequences whose ids are below ``rows``."""
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limit = longest or positions or DEFAULT_POSITIONS
        starts = (max(limit - LENGTHS[0], 0), 0)  # falls: transformers separates them by that
        ranges = [np.arange(length) for length in LENGTHS]
        return cls(tuple(((r + 1) % rows, r + s) for r, s in zip(ranges, starts, strict=True)))

    @staticmethod
    def row(*sequences: tuple[np.ndarray, np.ndarray]) -> Row:
        """These sequences as one row."""
        return Row.of([ids for ids, _ in sequences], [positions for _, positions in sequences])

    def packed_logits(self, modules: DecoderAndHead) -> torch.Tensor:
        """Logits [12, V] of both in one row, by decoder and head; float32."""
        row = self.row(*self.sequences).to(modules.linear.weight.device)
        states = decoded_states(modules.decoder, row, {})
        return shape_logits(modules.linear(states).float(), modules.shape)

    def logits_alone(self, model: Any) -> torch.Tensor:
        """Logits [12, V], float32, as the model itself computes them, one sequence at a time."""
        device = model.get_output_embeddings().weight.device
        rows = [self.row(one).to(device) for one in self.sequences]
        given = [{"input_ids": r.input_ids, "position_ids": r.position_ids} for r in rows]
        return torch.cat([model(**one, use_cache=False).logits[0] for one in given]).float()


def _compare_logits(model: Any, packed: torch.Tensor, alone: torch.Tensor) -> None:
    """StageError unless the logits agree up to float32 rounding."""
    tolerance = min(MAX_RELATIVE_DIFFERENCE * max(1.0, float(alone.abs().max())), MAX_DIFFERENCE)
    difference = float((packed - alone).abs().max())
    if not difference <= tolerance:
        raise StageError(
            "trainer",
            f"packed logits of {type(model).__name__} differ from the model's own by "
            f"{difference:.3g} (rounding explains {tolerance:.3g})",
            "the model changes its logits after the head, cannot be packed, or is random while it "
            "trains: choose another student.model",
        )


def _compare_rows(
    model: Any, packed: torch.Tensor, rounded: torch.Tensor, exact: torch.Tensor
) -> None:
    """StageError unless log-probabilities agree up to the rounding of the training precision."""
    tolerance = max(MAX_MEAN_NATS, MAX_TIMES_ROUNDING * _between(rounded, exact))
    difference = _between(packed, rounded)
    if not difference <= tolerance:
        raise StageError(
            "trainer",
            f"packed log-probabilities of {type(model).__name__} differ from the model's own by "
            f"{difference:.3g} nats in the mean of a row, both in the precision and with the "
            f"attention of training ({attention_of(model)}); rounding explains "
            f"{tolerance:.3g}",
            "set train.attention to another one, train.compile: false, or train.dtype: float32",
        )


def _between(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean difference of log-probabilities over the vocabulary, in the worst row, in nats."""
    return float((one.log_softmax(-1) - other.log_softmax(-1)).abs().mean(-1).max())


@contextmanager
def _attending(model: Any, implementation: str | None) -> Iterator[None]:
    """Sets the attention implementation during the block; None changes nothing."""
    chosen = attention_of(model)
    if implementation is not None and implementation != chosen:
        set_attention_of(model, implementation)
    try:
        yield
    finally:
        if attention_of(model) != chosen:
            set_attention_of(model, chosen)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """Sets eval mode during the block; afterwards each module has its own mode again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
