"""Whether the trainer computes the student's own logits: packed, in the mode in which it trains.

    two sequences, one at the start, one at the end of the positions
        ├─ alone: whole model, eval mode, eager attention, float32 ──► logits ─┐ differ by
        └─ packed: decoder, then head, as it trains ─────────────────► logits ─┘ rounding?

First in float32, where rounding explains little; then, if training is not in float32, both in its
precision and with its attention, where the rounding of that model is measured. Several ranks make
the first comparison only, on the CPU, before the student is sharded.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from async_opd.core.errors import StageError
from trainer.losses.logits import shape_logits
from trainer.student.loss_module import DecoderAndHead

LENGTHS = (5, 7)
MAX_RELATIVE_DIFFERENCE, MAX_DIFFERENCE = 1e-3, 0.1
"""Largest difference of logits in float32, as a share of the largest logit (or 1), and at all."""
MAX_MEAN_NATS, MAX_TIMES_ROUNDING = 0.05, 2.0
"""In another precision, largest mean difference of a row's log-probabilities: in nats, or so many
times what the precision itself makes of the same sequences alone."""
DEFAULT_POSITIONS = 4096
"""Positions of a model that names none."""


def check_student(
    model: Any,
    device: torch.device,
    precision: AbstractContextManager[Any],
    longest: int | None = None,
) -> None:
    """Compares two packed sequences, decoder then head, with each through the whole model.

    The model's mode stays as it is for what is packed. ``longest``: tokens of the longest sequence
    of the engines, by default the model's positions. StageError if they differ: the architecture
    changes its logits after the head in an unknown way, lets packed sequences see each other
    (recurrent state) or the longest one change the others (rotary factors), has something random
    in it, or has an attention that its own definition does not agree with. All of these train
    silently wrong. Costs at most six forward passes of at most 12 tokens.
    """
    modules = DecoderAndHead.of(model)
    probe = _Probe.of(model, modules, device, longest)
    flash = "flash" in (model.config._attn_implementation or "")
    try:
        with torch.no_grad():
            with _attending(model, "eager" if flash else None):
                exactly = probe.packed()
            with _attending(model, "eager"), _evaluating(model):
                alone = probe.alone()
            _compare_logits(model, exactly, alone)
            if not isinstance(precision, nullcontext) or (flash and device.type == "cuda"):
                with precision:
                    roughly = probe.packed()
                    with _evaluating(model):
                        rounded = probe.alone()
                _compare_rows(model, roughly, rounded, alone)
    except (TypeError, AttributeError, NotImplementedError) as error:
        message = f"{type(model).__name__} cannot compute packed rows: {error}"
        raise StageError("trainer", message, "this architecture is not supported") from error


@dataclass(frozen=True)
class _Probe:
    """Two sequences of tokens with their positions, [1, n] each."""

    model: Any
    modules: DecoderAndHead
    ids: tuple[torch.Tensor, ...]
    positions: tuple[torch.Tensor, ...]

    @classmethod
    def of(
        cls, model: Any, modules: DecoderAndHead, device: torch.device, longest: int | None
    ) -> _Probe:
        rows = modules.linear.weight.shape[0]
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
        limit = longest or positions or DEFAULT_POSITIONS
        starts = (max(limit - LENGTHS[0], 0), 0)  # a step down: packed sequences are told by it
        ids = tuple(torch.arange(1, n + 1, device=device)[None] % rows for n in LENGTHS)
        places = tuple(
            torch.arange(start, start + n, device=device)[None]
            for start, n in zip(starts, LENGTHS, strict=True)
        )
        return cls(model, modules, ids, places)

    def packed(self) -> torch.Tensor:
        """Logits [12, V], float32, as the trainer computes them."""
        states = self.modules.decoder(
            input_ids=torch.cat(self.ids, dim=1),
            position_ids=torch.cat(self.positions, dim=1),
            use_cache=False,
        ).last_hidden_state[0]
        return shape_logits(self.modules.linear(states).float(), self.modules.shape)

    def alone(self) -> torch.Tensor:
        """Logits [12, V], float32, as the model itself computes them, one sequence at a time."""
        logits = [
            self.model(input_ids=ids, position_ids=positions, use_cache=False).logits[0]
            for ids, positions in zip(self.ids, self.positions, strict=True)
        ]
        return torch.cat(logits).float()


def _compare_logits(model: Any, packed: torch.Tensor, alone: torch.Tensor) -> None:
    tolerance = min(MAX_RELATIVE_DIFFERENCE * max(1.0, float(alone.abs().max())), MAX_DIFFERENCE)
    difference = float((packed - alone).abs().max())
    if not difference <= tolerance:
        raise StageError(
            "trainer",
            f"packed logits of {type(model).__name__} differ from the model's own by "
            f"{difference:.3g} (rounding explains {tolerance:.3g})",
            "this architecture post-processes its logits, cannot be packed, or is random while "
            "it trains; it is not supported",
        )


def _compare_rows(
    model: Any, packed: torch.Tensor, rounded: torch.Tensor, exact: torch.Tensor
) -> None:
    tolerance = max(MAX_MEAN_NATS, MAX_TIMES_ROUNDING * _between(rounded, exact))
    difference = _between(packed, rounded)
    if not difference <= tolerance:
        raise StageError(
            "trainer",
            f"packed log-probabilities of {type(model).__name__} differ from the model's own by "
            f"{difference:.3g} nats in the mean of a row, both in the precision and with the "
            f"attention of training ({model.config._attn_implementation}); rounding explains "
            f"{tolerance:.3g}",
            "train.dtype float32, or another attention: uninstall flash-attn",
        )


def _between(one: torch.Tensor, other: torch.Tensor) -> float:
    """Mean difference of log-probabilities over the vocabulary, in the worst row, in nats."""
    return float((one.log_softmax(-1) - other.log_softmax(-1)).abs().mean(-1).max())


@contextmanager
def _attending(model: Any, implementation: str | None) -> Iterator[None]:
    """With this attention; None leaves it as it is."""
    chosen = model.config._attn_implementation
    if implementation in (None, chosen):
        yield
        return
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(chosen)


@contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """In eval mode; afterwards each module is in its own again."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
