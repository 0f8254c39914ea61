"""Bytes that autograd keeps of what sees, for the patches of a row's images.

    pixels ──patches──► x ──norm──► q, k, v ──rotary──► attention ──► + ──norm──► MLP ──► +

A tower of transformers has layers with two LayerNorms, rotary positions computed in float32, and an
MLP without gate. Which images a row will have is not known: all of its tokens may be of images.
"""

from __future__ import annotations

from async_opd.config.device_defaults import Recomputation
from async_opd.memory.activations import Precision
from async_opd.models.model_size import Tower


def kept_of_tower(tower: Tower, precision: Precision, recompute: Recomputation, tokens: int) -> int:
    """Bytes that the forward pass over the images of ``tokens`` leaves for the backward pass.

    The pixels are float32.
    """
    patches = tower.merged * tokens
    each = _layer(tower, precision)
    if recompute == "full":
        each = precision.residual * tower.hidden
    if recompute == "selective":
        each -= _again(tower, precision)
    return patches * (4 * tower.patch + tower.layers * each)


def layer_of_tower(
    tower: Tower, precision: Precision, recompute: Recomputation, tokens: int
) -> int:
    """Bytes of a layer's backward pass: what is computed again, and gradients of activations."""
    again = {"none": 0, "selective": _again(tower, precision), "full": _layer(tower, precision)}
    gradients = 2 * precision.residual * tower.hidden + 2 * precision.compute * tower.inner
    return tower.merged * tokens * (again[recompute] + gradients)


def _layer(tower: Tower, precision: Precision) -> int:
    """Of a patch: norms' inputs, inputs of products, q, k, v, rotated q and k, the result, MLP."""
    norms = 2 * precision.residual * tower.hidden
    inputs = precision.compute * tower.hidden * (3 if precision.casts else 2)
    attention = precision.compute * (3 + 2 + 1) * tower.hidden + 2 * 4 * tower.hidden
    return norms + inputs + attention + 2 * precision.compute * tower.inner


def _again(tower: Tower, precision: Precision) -> int:
    """Of a patch: what is no result of a product or of attention."""
    products = precision.compute * (3 + 1 + 1) * tower.hidden + precision.compute * tower.inner
    return max(_layer(tower, precision) - products - precision.residual * tower.hidden, 0)
