"""Bytes that autograd keeps of the vision tower, for the patches of a row's images.

    pixels ──patches──► x ──norm──► q, k, v ──rotary──► attention ──► + ──norm──► MLP ──► +
                                                                                       │
    tokens of the decoder ◄── projectors: of the last layer, and of some in between ◄──┘

Layers of most towers have LayerNorms and an MLP without gate; those of Qwen2.5-VL RMSNorms that
compute in float32, and a gate. Projectors are not computed again, whatever the layers are. Which
images a row will have is not known: all of its tokens may be of images.
"""

from __future__ import annotations

from async_opd.config.device_defaults import Recomputation
from async_opd.memory.activations import Precision
from async_opd.models.model_size import Tower


def pixels_of(tower: Tower, tokens: int) -> int:
    """Bytes of the float32 numbers of images of so many tokens."""
    return 4 * tower.patch * tower.merged * tokens


def kept_of_tower(
    tower: Tower, precision: Precision, recompute: Recomputation, tokens: int, still: bool = False
) -> int:
    """Bytes that the forward pass over the images of ``tokens`` leaves for the backward pass.

    ``still``: the projectors are trained, and the tower below them is not. Of one that is, the
    patches are copied to the type of products.
    """
    patches = tower.merged * tokens
    each = precision.compute * tower.projected + tower.projections * _norm(tower, precision)
    if not still:
        each += precision.compute * tower.patch if precision.compute < 4 else 0
        each += tower.layers * _kept(tower, precision, recompute)
    return pixels_of(tower, tokens) + patches * each


def layer_of_tower(
    tower: Tower, precision: Precision, recompute: Recomputation, tokens: int, still: bool = False
) -> int:
    """Bytes of a layer's backward pass: what is computed again, and gradients of activations.

    ``still``: of a projector's.
    """
    if still:
        return tower.merged * tokens * precision.compute * tower.projected
    again = _layer(tower, precision) - _kept(tower, precision, recompute)
    gradients = 2 * precision.residual * tower.hidden + 2 * precision.compute * tower.inner
    return tower.merged * tokens * (again + gradients)


def _kept(tower: Tower, precision: Precision, recompute: Recomputation) -> int:
    """Of a patch in a layer; ``selective`` leaves its input, and results of products."""
    if recompute == "none":
        return _layer(tower, precision)
    entry = precision.residual * tower.hidden
    if recompute == "full":
        return entry
    inner = tower.inner * (2 if tower.gated else 1)
    return entry + precision.compute * ((3 + 1 + 1 + 1) * tower.hidden + inner)


def _layer(tower: Tower, precision: Precision) -> int:
    """Of a patch: norms, inputs of products, q, k, v, rotated q and k, the result twice, MLP."""
    inputs = precision.compute * tower.hidden * (3 if precision.casts else 2)
    attention = precision.compute * (3 + 2 + 2) * tower.hidden
    inner = precision.compute * tower.inner * (4 if tower.gated else 2)
    return 2 * _norm(tower, precision) + inputs + attention + inner


def _norm(tower: Tower, precision: Precision) -> int:
    """A LayerNorm keeps its input; an RMSNorm of float32 see ``Precision.norm``."""
    if tower.gated:
        return precision.norm(tower.hidden)
    return precision.residual * tower.hidden
