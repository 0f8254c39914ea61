"""Checks that packed rows, computed as in training, have the logits of the model itself.

    two sequences, one at the start, one at the end of the positions
        ├─ alone: whole model, eval mode, eager attention, float32 ──► logits ─┐ differ by
        └─ packed: decoder, then head, as it trains ─────────────────► logits ─┘ rounding?

The first comparison is in float32, where rounding explains little. The second is made if training
is not in float32: both sides have the precision and the attention of training, and the rounding of
that precision is measured. With several ranks, rank 0 makes the first comparison only, on the CPU,
before the student is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from async_opd.core.errors import StageError
from trainer.losses.logits import shape_logits
from trainer.student.loss_module import UNSUPPORTED, DecoderAndHead

LENGTHS = (5, 7)
MAX_RELATIVE_DIFFERENCE, MAX_DIFFERENCE = 1e-3, 0.1
"""Largest difference of logits in float32: relative to the largest logit (or 1), and absolute."""
MAX_MEAN_NATS, MAX_TIMES_ROUNDING = 0.05, 2.0
"""Largest mean difference of a row's log-probabilities in another precision: in nats, or as a
multiple of the difference that the precision itself makes for the same sequences alone."""
DEFAULT_POSITIONS = 4096
"""Positions of a model whose config has no max_position_embeddings."""


def check_student(
    model: Any,
    device: torch.device,
    precision: AbstractContextManager[Any],
    longest: int | None = None,
) -> None:
    """Compares two packed sequences (decoder, then head) with each alone through the whole model.

    Packed rows are computed in the model's current mode. ``longest``: tokens of the longest
    sequence of the engines, by default the model's positions. StageError if the logits differ: the
    architecture changes its logits after the head in an unknown way, lets packed sequences attend
    to each other (recurrent state), lets the longest one change the others (rotary factors),
    computes something random, or has an attention kernel that differs from its eager definition.
    Each of these would train on wrong logits without an error. At most six forward passes of at
    most 12 tokens.
    """
    modules = DecoderAndHead.of(model)
    probe = _Probe.of(model, modules, device, longest)
    flash = "flash" in (model.config._attn_implementation or "")
    try:
        with torch.no_grad():
            with _attending(model, "eager" if flash else None):
                packed = probe.packed()
            with _attending(model, "eager"), _evaluating(model):
                alone = probe.alone()
            _compare_logits(model, packed, alone)
            if not isinstance(precision, nullcontext) or (flash and device.type == "cuda"):
                with precision:
                    packed = probe.packed()
                    with _evaluating(model):
                        rounded = probe.alone()
                _compare_rows(model, packed, rounded, alone)
    except (TypeError, AttributeError, NotImplementedError) as error:
        message = f"{type(model).__name__} cannot compute packed rows: {error}"
        raise StageError("trainer", message, UNSUPPORTED) from error


@dataclass(frozen=True)
class _Probe:
    """Two sequences: inputs of the model by name, [1, n] each."""

    model: Any
    modules: DecoderAndHead
    sequences: tuple[dict[str, torch.Tensor], ...]

    @classmethod
    def of(
        cls, model: Any, modules: DecoderAndHead, device: torch.device, longest: int | None
    ) -> _Probe:
        rows = modules.linear.weight.shape[0]
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limit = longest or positions or DEFAULT_POSITIONS
        starts = (max(limit - LENGTHS[0], 0), 0)  # falls: transformers separates them by that
        ranges = (torch.arange(length, device=device)[None] for length in LENGTHS)
        sequences = (
            {"input_ids": (one + 1) % rows, "position_ids": one + start}
            for one, start in zip(ranges, starts, strict=True)
        )
        return cls(model, modules, tuple(sequences))

    def packed(self) -> torch.Tensor:
        """Logits [12, V], float32, as the trainer computes them."""
        first, second = self.sequences
        inputs = {name: torch.cat([first[name], second[name]], dim=1) for name in first}
        states = self.modules.decoder(**inputs, use_cache=False).last_hidden_state[0]
        return shape_logits(self.modules.linear(states).float(), self.modules.shape)

    def alone(self) -> torch.Tensor:
        """Logits [12, V], float32, as the model itself computes them, one sequence at a time."""
        logits = [self.model(**one, use_cache=False).logits[0] for one in self.sequences]
        return torch.cat(logits).float()


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
            f"attention of training ({model.config._attn_implementation}); rounding explains "
            f"{tolerance:.3g}",
            "set train.dtype: float32, or uninstall flash-attn for another attention",
        )


def _between(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean difference of log-probabilities over the vocabulary, in the worst row, in nats."""
    return float((one.log_softmax(-1) - other.log_softmax(-1)).abs().mean(-1).max())


@contextmanager
def _attending(model: Any, implementation: str | None) -> Iterator[None]:
    """Sets the attention implementation during the block; None changes nothing."""
    chosen = model.config._attn_implementation
    if implementation not in (None, chosen):
        model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        if model.config._attn_implementation != chosen:
            model.set_attn_implementation(chosen)


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
