"""Bytes of one rank of the trainer in a step, term by term: pure functions of ``Step``.

    always    parameters, gradients, moments, what ``Step.kept`` names
    forward   activations ──► the loss: a chunk of logits, the head's gradient
    backward  activations, a layer's gradients, parameters gathered from the other ranks

The peak is the larger of the loss and the backward pass. Gradients are there from the first of
several micro-batches on.

For each token, autograd keeps of a decoder layer, as transformers' layers are written:

    x ──norm──► z ──q, k, v──► (norm) ──rotary──► attention ──o──► + ──norm──► z ──MLP──► +

Which tensors a backward pass needs is counted operation by operation; docs/memory.md has the sums.
A number of bytes stands before the width that it is multiplied by.

For the patches of a row's images, it keeps of the vision tower:

    pixels ──patches──► x ──norm──► q, k, v ──rotary──► attention ──► + ──norm──► MLP ──► +
                                                                                       │
    tokens of the decoder ◄── projectors: of the last layer, and of some in between ◄──┘

Layers of most towers have LayerNorms and an MLP without gate; those of Qwen2.5-VL RMSNorms that
compute in float32, and a gate. Projectors are not computed again, whatever the layers are. Which
images a row will have is not known: all of its tokens may be of images.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

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
    """Of a mixture: the router's probabilities; and of each expert of a token all that it has.

    Its input is a copy of the token's, its result is kept for its weight's gradient. Products of
    grouped matrices know no autocast: they compute in the weights' type, the residual stream's.
    """
    if size.experts:
        each = precision.residual * (2 * size.hidden + 4 * size.inner)
        router = precision.inputs(size.hidden, 1) + 4 * size.experts
        return router + size.active * (each + 32)
    inner = precision.compute * size.inner * (4 if size.gated else 2)
    return precision.inputs(size.hidden, 2 if size.gated else 1) + inner


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
    again = _tower_layer(tower, precision) - _kept(tower, precision, recompute)
    gradients = 2 * precision.residual * tower.hidden + 2 * precision.compute * tower.inner
    return tower.merged * tokens * (again + gradients)


def _kept(tower: Tower, precision: Precision, recompute: Recomputation) -> int:
    """Of a patch in a layer; ``selective`` leaves its input, and results of products."""
    if recompute == "none":
        return _tower_layer(tower, precision)
    entry = precision.residual * tower.hidden
    if recompute == "full":
        return entry
    inner = tower.inner * (2 if tower.gated else 1)
    return entry + precision.compute * ((3 + 1 + 1 + 1) * tower.hidden + inner)


def _tower_layer(tower: Tower, precision: Precision) -> int:
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


MIB = 1 << 20
CHUNK = {"cpu": 256 * MIB, "cuda": 1024 * MIB}
"""Bytes of the logits in memory at a time (``trainer.losses.chunked.CHUNK_BYTES``)."""
TILE = {"cpu": 16 * MIB, "cuda": 256 * MIB}
"""Bytes that an objective works on at a time (``trainer.losses.compiled.TILE_BYTES``)."""

Terms = dict[str, int]
"""Bytes by what they are for."""


@dataclass(frozen=True)
class Step:
    """The inputs of a rank's memory.

    ``ranks`` share the student, with ``copies`` of all shards. ``tokens`` are a rank's of its
    longest row, of which ``responses`` reach the head. ``half``: it computes in bfloat16.
    ``recompute``: which activations it computes again. ``mask``: attention has a mask of the whole
    row. ``trained``: entries of adapters, None if all weights are trained. ``still``: entries of
    vision parts that are frozen, and ``vision_frozen``: nothing of it is trained. ``moment_bytes``:
    of both moments of an entry. ``on_host``: terms that are in host memory instead.
    ``teacher_vocabulary``: columns of a teacher's logits in the trainer. ``reduces_once``: each
    rank sums its gradients before they are sharded, on its GPU whatever ``on_host`` says. ``kept``:
    further bytes that are there all the time, by term.
    """

    size: ModelSize
    device: Literal["cpu", "cuda"] = "cuda"
    ranks: int = 1
    copies: int = 1
    tokens: int = 16384
    responses: int = 16384
    half: bool = True
    recompute: Recomputation = "full"
    mask: bool = False
    trained: int | None = None
    still: int = 0
    vision_frozen: bool = False
    moment_bytes: float = 8
    on_host: frozenset[str] = frozenset()
    teacher_vocabulary: int = 0
    reduces_once: bool = False
    kept: Mapping[str, int] = field(default_factory=dict)

    @property
    def sharded(self) -> bool:
        """Whether several ranks share the student."""
        return self.ranks > 1

    @property
    def precision(self) -> Precision:
        """FSDP gathers parameters in the type of products, and frozen ones have it.

        Autocast leaves all but products float32.
        """
        compute = 2 if self.half else 4
        return Precision(compute, compute if self.sharded or self.frozen else 4)

    @property
    def frozen(self) -> bool:
        """Whether adapters are trained in place of the student's own weights."""
        return self.trained is not None


def states(step: Step) -> Terms:
    """A rank's memory in every phase of a step: its share of weights, gradients and moments."""
    size, shards = step.size, step.ranks // step.copies
    trained = size.floats - step.still if step.trained is None else step.trained
    frozen = (2 if step.half else 4) * (step.still if step.trained is None else size.floats)
    found = {
        "parameters": (frozen + 4 * trained) // shards,
        "gradients": 4 * trained // (1 if step.reduces_once else shards),
        "moments": int(step.moment_bytes * trained) // shards,
        **step.kept,
    }
    away = step.on_host - ({"gradients"} if step.reduces_once else set())
    return {term: nbytes for term, nbytes in found.items() if term not in away}


def peak(step: Step) -> Terms:
    """All terms at the moment with the most bytes; their sum is the peak."""
    phases = [states(step) | of(step) for of in (loss, backward)]
    return max(phases, key=lambda terms: sum(terms.values()))


def loss(step: Step) -> Terms:
    """While the head's gradient is computed."""
    compute, size = step.precision.compute, step.size
    heads = 0 if size.tied else 2 * size.vocabulary * size.hidden
    gathered = compute * (_root(step) + heads)
    return {
        "activations": _activations_before_head(step),
        "logits": _logits(step),
        **_seen(step),
        **({"gathered parameters": gathered} if step.sharded else _casts(step)),
    }


def backward(step: Step) -> Terms:
    """In the backward pass: of the head, a layer, or an embedding that is the head too."""
    phases = [_head_backward(step) | _seen(step), _layer_backward(step) | _seen(step)]
    if step.sharded:
        phases.append(_layer_backward(step, inner=True) | _seen(step))
    elif step.size.tied and not step.frozen:
        # its gradients as head and as embedding, and their sum
        table = 12 * step.size.vocabulary * step.size.hidden
        phases.append({"activations": kept_activations(step, 0), "head's gradient": table})
    if step.size.tower and not (step.frozen or step.vision_frozen):
        phases.append(_tower_backward(step))
    return max(phases, key=lambda terms: sum(terms.values()))


def _seen(step: Step, backward: bool = False) -> Terms:
    """Pixels, and what a trained tower keeps of them; ``backward``: in its pass, with a layer."""
    tower = step.size.tower
    if tower is None:
        return {}
    if step.frozen or step.vision_frozen:
        return {"images": pixels_of(tower, step.tokens)}
    still = step.still == tower.entries - tower.projector
    of = (tower, step.precision, step.recompute, step.tokens, still)
    return {"images": kept_of_tower(*of) + (layer_of_tower(*of) if backward else 0)}


def _tower_backward(step: Step) -> Terms:
    """Of the tower's last layer; the embedding's gradient of the head waits for its other one."""
    size, compute = step.size, step.precision.compute
    found = _seen(step, backward=True)
    waiting = size.vocabulary * size.hidden if size.tied else 0
    if not step.sharded:
        return found | {"head's gradient": 4 * waiting}
    gathered = _root(step) + (2 * size.tower.block if size.tower else 0)
    return found | {
        "gathered parameters": compute * gathered,
        "gathered gradients": compute * waiting,
    }


def _root(step: Step) -> int:
    """Entries that FSDP gathers with the whole model: all outside of layers, but for the head."""
    size = step.size
    head = 0 if size.tied else size.vocabulary * size.hidden
    outside = size.outside + (size.tower.outside if size.tower else 0)
    return size.hidden * size.embeddings - head + outside


def _activations_before_head(step: Step) -> int:
    """All activations, with the final norm's, the last states and the rows that reach the head."""
    states_ = step.precision.residual * step.size.hidden * (step.tokens + step.responses)
    return kept_activations(step) + step.precision.norm(step.size.hidden) * step.tokens + states_


def _head_backward(step: Step) -> Terms:
    """The head's gradient, and as it is scaled; then, of several ranks, as it is reduced."""
    size, compute = step.size, step.precision.compute
    found = {"activations": _activations_before_head(step)}
    head = 0 if step.frozen else size.vocabulary * size.hidden
    if not step.sharded:
        # autocast has forgotten the others
        casts = _casts(step, one_layer=step.recompute != "none")
        return found | {"head's gradient": 8 * head} | casts
    shards = step.ranks // step.copies
    reduced = compute * head if size.tied else 4 * head // shards
    if not (size.tied or step.reduces_once):
        reduced += 4 * head
    found["gathered parameters"] = compute * (_root(step) + size.block)
    return found | {"gathered gradients": compute * head + reduced}


def _layer_backward(step: Step, inner: bool = False) -> Terms:
    """Of the decoder's last layer; ``inner``: of one before it, while that is reduced."""
    layer = layer_gradients(step.size, step.precision) * step.tokens
    if step.recompute != "none":
        layer += _layer(step)
    if step.recompute == "selective":
        layer -= products_bytes(step.size, step.precision) * step.tokens
    depth = step.size.layers - inner
    found = {"activations": kept_activations(step, depth), "one layer": layer}
    if step.sharded:
        return found | _gathered(step, inner)
    if step.size.tied and not step.frozen:  # autograd adds the embedding's before it accumulates
        found["head's gradient"] = 4 * step.size.vocabulary * step.size.hidden
    return found | _casts(step, one_layer=step.recompute != "none")


def kept_activations(step: Step, layers: int | None = None) -> int:
    """Bytes that the forward pass of so many layers, or of all, leaves for the backward pass."""
    each = _layer(step)
    if step.recompute != "none":
        each = step.precision.residual * step.size.hidden * step.tokens
    if step.recompute == "selective":
        each += products_bytes(step.size, step.precision) * step.tokens
    rotary = 2 * step.precision.residual * step.size.query // max(step.size.heads, 1)
    depth = step.size.layers if layers is None else layers
    return depth * each + rotary * step.tokens + (step.tokens**2 if step.mask else 0)


def _layer(step: Step) -> int:
    """Activations of one layer, with the mask in the type of its scores."""
    mask = step.precision.compute * step.tokens**2 if step.mask else 0
    return layer_bytes(step.size, step.precision, step.mask) * step.tokens + mask


def _logits(step: Step) -> int:
    """A chunk of logits, what is computed of it, and gradients of head and hidden rows."""
    size, vocabulary = step.size, step.size.vocabulary
    row = max(4 * (vocabulary + step.teacher_vocabulary), 1)  # 0: the model is not here yet
    rows = max(min(CHUNK[step.device] // row, step.responses), 1)
    head = 0 if step.frozen else vocabulary * size.hidden
    copy, cast = (2 * head, 2 * rows * vocabulary) if step.half else (0, 0)
    # The head's gradient: of a product with a result in 16 bits, which a GPU has no need of; or
    # as the type of a gathered weight. Autocast has a copy of the weight beside.
    product = cast + (copy if step.device == "cpu" else 0)
    work = max(product, min(TILE[step.device], rows * row), copy if step.sharded else 0)
    weight = copy if step.precision.casts else 0
    return rows * row + work + 4 * (head + size.hidden * step.responses) + weight


def _casts(step: Step, one_layer: bool = False) -> Terms:
    """The copies in 16 bits that autocast makes of all matrices of the decoder, or of a layer's."""
    if not step.precision.casts or step.frozen:
        return {}
    return {"bfloat16 copies": 2 * step.size.block * (1 if one_layer else step.size.layers)}


def _gathered(step: Step, inner: bool) -> Terms:
    """The root's parameters, a layer's, those of the one that is next if there is one; gradients.

    ``inner``: of a layer before the last, which is reduced meanwhile; the head is before. The input
    of a reduction is a copy in float32, or of full gradients that this then frees. Fresh gradients
    of a layer are those of its last matrix, before most of its activations are freed.
    """
    size, compute = step.size, step.precision.compute
    head, tied = size.vocabulary * size.hidden, compute * size.embeddings * size.hidden
    blocks = min(2, size.layers - inner)
    found = {"gathered parameters": compute * (_root(step) + blocks * size.block)}
    if step.frozen:
        return found
    done, now = (0 if size.tied else head), (size.block if inner else 0)
    reduced = 4 * (now or done)
    if step.reduces_once:
        reduced = 4 * (done + now) // (step.ranks // step.copies) - (4 * done if inner else 0)
    if step.recompute != "none" and not (step.reduces_once and compute == 4):
        reduced += compute * size.block // 2
    return found | {"gathered gradients": reduced + (tied if size.tied else 0)}
