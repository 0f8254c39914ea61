"""Decoder layers: what each keeps for its backward pass, and how torch compiles it.

    FSDP gathers a layer ──► its graph ──► FSDP frees it        the hooks stay outside of the graph
                              └─ cannot be compiled, or too many graphs ──► all layers eagerly

Layers of a kind, and rows of any length, share a graph.

A compiled layer is one graph, recomputation included. By activation checkpointing it keeps:

    none        all that autograd saves
    selective   its input, and the results of matrix products and of attention
    full        its input

Values that are not kept are computed again in the backward pass, from those that are: with
``selective`` norms, rotary positions and activation functions, with ``full`` the whole layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from async_opd.config.device_defaults import Recomputation, recomputation
from async_opd.core.errors import StageError
from trainer.losses.compiled import is_compile_error, summary
from trainer.notes import note

if TYPE_CHECKING:
    from async_opd.config.sections.train import TrainConfig

MAX_GRAPHS = 32
"""With gradients and without, for each kind of layer and of mask: a few for known students."""
REASON = "last reason: "
"""In Dynamo's warning of too many graphs: the guard that failed."""
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
    kept = operation.name().split(".")[0] in KEPT
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(model: Any, backend: Any = "inductor") -> CompiledLayers:
    """Compiles each decoder layer at its first call. After ``recompute_activations``.

    A layer that cannot be one graph, and a graph more than ``MAX_GRAPHS``, end it for all layers:
    a note names the cause. So does a model without layers that transformers could recompute.
    """
    layers = checkpointing_layers(model)
    if not layers:
        note(f"train.compile has no effect: {type(model).__name__} has no layers to compile")
    run = CompiledLayers(backend)
    for layer in layers:
        layer.forward = partial(run, layer.forward)
    return run


def _run(forward: Any, *args: Any, **named: Any) -> Any:
    return forward(*args, **named)


class CompiledLayers:
    """Runs layers compiled until one of them cannot be; a call's backward pass is of its form."""

    def __init__(self, backend: Any) -> None:
        compiled: Any = torch.compile  # its overloads lack recompile_limit
        self._compiled: Any = compiled(
            _run, dynamic=True, fullgraph=True, backend=backend, recompile_limit=MAX_GRAPHS
        )
        self._reason = ""
        logging.getLogger("torch._dynamo.convert_frame").addFilter(self._keep_reason)

    @property
    def is_compiled(self) -> bool:
        """Whether layers run compiled, until one of them cannot."""
        return self._compiled is not None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Runs all layers eagerly during the block.

        Compiled ones skip hooks of modules that were added after the compilation.
        """
        compiled, self._compiled = self._compiled, None
        try:
            yield
        finally:
            self._compiled = compiled

    def __call__(self, forward: Any, *args: Any, **named: Any) -> Any:
        from torch._functorch import config as aot
        from torch.fx.experimental import _config as shapes

        if self._compiled is not None:
            # A backward graph that cannot be compiled is an error here, not in the backward pass;
            # sizes that are equal by chance are not taken for the same size.
            early = aot.patch(force_non_lazy_backward_lowering=True)
            with early, shapes.patch(use_duck_shape=False):  # type: ignore[attr-defined]
                try:
                    return self._compiled(forward, *args, **named)
                except Exception as error:
                    if not is_compile_error(error):
                        raise
                    self._compiled = None
                    cause = f"more than {MAX_GRAPHS} graphs, {self._reason}"
                    cause = cause if self._reason else summary(error)
                    note(f"decoder layers run eagerly, not compiled: {cause}")
        return forward(*args, **named)

    def _keep_reason(self, warning: logging.LogRecord) -> bool:
        """Keeps the failed guard of a warning that there are too many graphs."""
        for line in warning.getMessage().splitlines():
            if REASON in line:
                self._reason = line.partition(REASON)[2]
        return True
