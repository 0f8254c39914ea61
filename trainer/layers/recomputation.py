"""Activation checkpointing of decoder layers: what a layer keeps for its backward pass.

    none        all that autograd saves
    selective   its input, and the results of matrix products and of attention
    full        its input

Values that are not kept are computed again in the backward pass, from those that are: with
``selective`` norms, rotary positions and activation functions, with ``full`` the whole layer.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from async_opd.config.device_defaults import Recomputation, recomputation
from async_opd.core.errors import StageError
from trainer.notes import note

if TYPE_CHECKING:
    from async_opd.config.sections.train import TrainConfig

KEPT = {
    "aten::mm",
    "aten::addmm",
    "aten::_grouped_mm",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "torch_attn::_varlen_attn",
    "flash_attn::_flash_attn_varlen_forward",
    "flex_attention",
}
"""Operations whose results ``selective`` keeps: those that take the time of a layer. Batched
products are none of them: eager attention makes its T² scores with one."""


def set_recomputation(model: Any, train: TrainConfig, device: str) -> None:
    """Recomputes activations where ``train`` says so; by ``auto`` only if its layers can be.

    StageError for ``selective`` or ``full`` and a model without such layers.
    """
    kind = recomputation(train, device)
    if kind == "none":
        return
    try:
        recompute_activations(model, kind)
    except StageError as error:
        if train.gradient_checkpointing != "auto":
            raise
        note(f"{error.cause}: all of them are kept")


def recompute_activations(model: Any, kind: Recomputation = "full") -> None:
    """Keeps of each decoder layer what ``kind`` says; the backward pass computes the rest again.

    transformers' own switch works in training mode only. StageError for a model without any
    ``GradientCheckpointingLayer``.
    """
    layers = checkpointing_layers(model)
    if not layers:
        raise StageError(
            "trainer",
            f"{type(model).__name__} has no layers whose activations could be recomputed",
            "set train.gradient_checkpointing: none",
        )
    recomputed: Any = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if kind == "selective":
        contexts = partial(create_selective_checkpoint_contexts, _policy)
        recomputed = partial(recomputed, context_fn=contexts)
    for layer in layers:
        layer.forward = partial(recomputed, layer.forward)


def checkpointing_layers(model: Any) -> list[Any]:
    """The decoder layers of a model that transformers could recompute."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    return [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]


def _policy(context: Any, operation: Any, *args: Any, **named: Any) -> CheckpointPolicy:
    name = operation.name().split(".")[0]
    kept = name in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE
