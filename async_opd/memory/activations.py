"""Bytes for each token that autograd keeps of a decoder layer, as transformers' layers are written.

    x ──norm──► z ──q, k, v──► (norm) ──rotary──► attention ──o──► + ──norm──► z ──MLP──► +

Which tensors a backward pass needs is counted operation by operation; docs/memory.md has the sums.
A number of bytes stands before the width that it is multiplied by.

Bytes that autograd keeps of the vision tower, for the patches of a row's images.

    pixels ──patches──► x ──norm──► q, k, v ──rotary──► attention ──► + ──norm──► MLP ──► +
                                                                                       │
    tokens of the decoder ◄── projectors: of the last layer, and of some in between ◄──┘

Layers of most towers have LayerNorms and an MLP without gate; those of Qwen2.5-VL RMSNorms that
compute in float32, and a gate. Projectors are not computed again, whatever the layers are. Which
images a row will have is not known: all of its tokens may be of images.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_opd.config.device_defaults import Recomputation
from async_opd.models.model_size import ModelSize, Tower


@dataclass(frozen=True)
class Precision:
    """Bytes of an entry: of a product's ``compute`` and of the ``residual`` stream.

    ``casts``: autocast makes a copy of its input for every product, since the residual stream is
    wider than the products are.
    """

    compute: int
    residual: int

    @property
    def casts(self) -> bool:
        """Whether inputs of products are separate copies."""
        return self.compute != self.residual

    def norm(self, width: int) -> int:
        """Of an RMSNorm that computes in float32: its input in float32, and its quotient."""
        return (4 + self.residual) * width

    def inputs(self, width: int, products: int) -> int:
        """Of the input of so many products."""
        return self.compute * width * (products if self.casts else 1)


def layer_bytes(size: ModelSize, precision: Precision, repeats_keys: bool) -> int:
    """Bytes of one layer for each token.

    ``repeats_keys``: attention with a mask computes with as many keys and values as queries.
    """
    norms = size.norms * precision.norm(size.hidden)
    return norms + _attention(size, precision, repeats_keys) + _feed_forward(size, precision)


def _attention(size: ModelSize, precision: Precision, repeats_keys: bool) -> int:
    """Queries, keys, values, the result, which is the output matrix's input, and a float32 lse."""
    keys = size.query if repeats_keys else size.key
    kept = precision.compute * (2 * size.query + 2 * keys) + 4 * size.heads
    if size.query_norms:  # inputs are results of products: float32 copies of 16 bits, and quotients
        kept += (4 + precision.compute) * (size.query + size.key)
    return precision.inputs(size.hidden, 3) + kept


def _feed_forward(size: ModelSize, precision: Precision) -> int:
    if size.experts:
        return _experts(size, precision)
    inner = precision.compute * size.inner * (4 if size.gated else 2)
    return precision.inputs(size.hidden, 2 if size.gated else 1) + inner


def _experts(size: ModelSize, precision: Precision) -> int:
    """Of a mixture: the router's probabilities; and of each expert of a token all that it has.

    Its input is a copy of the token's, its result is kept for its weight's gradient. Products of
    grouped matrices know no autocast: they compute in the weights' type, the residual stream's.
    """
    each = precision.residual * (2 * size.hidden + 4 * size.inner)
    router = precision.inputs(size.hidden, 1) + 4 * size.experts
    return router + size.active * (each + 32)


def products_bytes(size: ModelSize, precision: Precision) -> int:
    """Bytes of one layer for each token that are results of matrix products and of attention."""
    experts = max(size.active, 1)
    compute = precision.residual if size.experts else precision.compute
    inner = compute * experts * (size.inner * (2 if size.gated else 1) + size.hidden)
    attention = 2 * (size.query + size.key) + size.hidden
    return precision.compute * attention + 4 * size.heads + 4 * size.experts + inner


def layer_gradients(size: ModelSize, precision: Precision) -> int:
    """Bytes for each token of the gradients of activations that a layer's backward pass has.

    Of the residual stream two, and the two widest of the feed-forward part.
    """
    compute = precision.residual if size.experts else precision.compute
    return 2 * precision.residual * size.hidden + 2 * compute * size.inner * max(size.active, 1)


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
