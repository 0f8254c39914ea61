"""The model's weights under the names of its checkpoint, by which the engines load them.

a layer's parameters, buffers ──gather──► transformers' names ──revert conversion──► checkpoint
the next layer's              ──────►      │                                          names
                                           └─ all experts, to engines ──► one tensor, as it is
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakKeyDictionary

import torch

from async_opd.weight_sync.layout import experts_apart, experts_together
from trainer.saving.state import model_state
from trainer.student.adapters import BASE, LORA, adapter_parameters, adapter_state, plain_state
from trainer.student.sharding import blocks_of, full_tensor, is_sharded
from trainer.vision.parts import vision_parameters

if TYPE_CHECKING:
    from async_opd.config.sections.train import LoraConfig

_BY_LAYER: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()
"""Whether a model's tensors are converted layer by layer."""
_EXPERTS: WeakKeyDictionary[Any, dict[str, str]] = WeakKeyDictionary()
"""Names under which engines get all experts of a layer at once, by a model's own names."""
Gathered = Literal["sent", "exported"]
"""A method of ``FullWeights`` that returns full tensors, for which every rank sends its shards."""


class FullWeights:
    """A rank's weights as full tensors: rank 0 gathers them, the other ranks join each gather."""

    def __init__(self, model: Any, wire_dtype: torch.dtype, lora: LoraConfig | None) -> None:
        """Engines that apply adapters (``train.lora.sync``) are sent these alone."""
        self._model, self._wire_dtype = model, wire_dtype
        self._adapters = lora is not None and lora.sync == "adapter"

    def sent(self, copied: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """The weights as engines are sent them, in their dtype: see ``named_weights``."""
        if self._adapters:
            return adapter_weights(self._model, self._wire_dtype, copied)
        return named_weights(self._model, self._wire_dtype, copied, changing=True)

    def exported(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """The full weights in ``dtype``, adapters merged; then the adapters as they are.

        Each is valid until the next. Adapters come under the names of their parameters.
        """
        yield from named_weights(self._model, dtype, copied=False)
        for name, tensor in adapter_parameters(self._model):
            yield name, full_tensor(tensor.detach())

    def join_gather(self, what: Gathered, dtype: torch.dtype | None = None) -> None:
        """Sends this rank's shards, in ``dtype`` or the engines', while rank 0 runs ``what``."""
        state = adapter_state if self._adapters else sent_state
        for _, tensor in (state if what == "sent" else plain_state)(self._model):
            full_tensor(tensor.detach().to(dtype or self._wire_dtype))
        if what == "exported":
            for _, tensor in adapter_parameters(self._model):
                full_tensor(tensor.detach())


def named_weights(
    model: Any, dtype: torch.dtype, copied: bool = True, changing: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that ``save_pretrained`` would write, as (name, full copy); adapters are merged.

    Parameters are in ``dtype``. Persistent buffers keep their own: engines have those of mixtures
    (the correction of a router's scores) in float32, whatever the dtype of their weights. And what
    of a layer is not sent, vLLM's reload may leave empty.

    A head tied to the embedding appears once, under the embedding's name. transformers fuses the
    experts of a mixture in memory; here each has its checkpoint name. Of a sharded model every
    other rank joins the gather (``FullWeights.join_gather``), and the full weights of one layer are
    in memory at a time: a block, or a module outside of them. Without ``copied`` a tensor is valid
    until the next one is asked for, and may be the model's own.

    ``changing``: what engines are sent, see ``sent_state``, with the experts of a layer as
    transformers has them. ``weight_sync.layout.experts_apart`` gives their checkpoint names.
    """
    layer_of = _layers_of(model)
    state, together = (sent_state, _experts(model)) if changing else (plain_state, {})
    for _, layer in groupby(state(model), lambda named: layer_of(named[0])):
        yield from _reverted(model, layer, dtype, copied, together)


def sent_state(model: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """``plain_state`` without what training never changes of a tower and its projector.

    Engines have these from the student's own files.
    """
    names = _frozen_parameters(model)
    yield from ((name, one) for name, one in plain_state(model) if name not in names)


def frozen_names(model: Any) -> tuple[str, ...]:
    """The checkpoint names of what ``sent_state`` leaves out."""
    from transformers.core_model_loading import revert_weight_conversion

    names = _frozen_parameters(model)
    empty = {
        name: torch.empty(one.shape, device="meta")
        for name, one in model.named_parameters()
        if name in names
    }
    return tuple(revert_weight_conversion(model, empty)) if empty else ()


def _frozen_parameters(model: Any) -> set[str]:
    """The names of parameters of a tower and its projector that are not trained."""
    frozen = {id(p) for _, _, p in vision_parameters(model) if not p.requires_grad}
    return {name for name, p in model.named_parameters() if id(p) in frozen}


def _reverted(
    model: Any,
    layer: Iterator[tuple[str, torch.Tensor]],
    dtype: torch.dtype,
    copied: bool,
    together: Mapping[str, str],
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of a layer under their checkpoint names; those ``together`` as they are."""
    from transformers.core_model_loading import revert_weight_conversion

    full = {
        name: _full(
            tensor.detach(), dtype if isinstance(tensor, torch.nn.Parameter) else None, copied
        )
        for name, tensor in layer
    }
    experts = [(together[name], full.pop(name)) for name in [*full] if name in together]
    yield from revert_weight_conversion(model, full).items()
    yield from experts


def _experts(model: Any) -> dict[str, str]:
    """The names of tensors [experts, rows, columns] on their way to engines, by the model's own.

    Those whose conversion is proven, on small numbers, to be that of ``experts_apart``. Others,
    such as transposed ones, are converted by transformers.
    """
    from transformers.core_model_loading import revert_weight_conversion

    if model not in _EXPERTS:
        _EXPERTS[model] = found = {}
        for name, tensor in model_state(model):
            if tensor.ndim != 3:
                continue
            numbers = torch.arange(len(tensor) * 60).view(len(tensor), 12, 5)
            try:
                made = revert_weight_conversion(model, {name: numbers})
            except (RuntimeError, ValueError):
                continue  # it takes no numbers of these sizes, or no tensor by itself
            together = experts_together([*made][:: len(tensor)])
            apart = dict(experts_apart([(together, numbers)])) if together else {}
            if apart.keys() == made.keys() and all(
                torch.equal(apart[one], made[one]) for one in made
            ):
                found[name] = together
    return _EXPERTS[model]


def adapter_weights(
    model: Any, dtype: torch.dtype, copied: bool = True
) -> Iterator[tuple[str, torch.Tensor]]:
    """Full copies of the adapters alone, in ``dtype``, for engines that apply them.

    ``copied``: see ``named_weights``.
    """
    yield from ((name, _full(tensor, dtype, copied)) for name, tensor in adapter_state(model))


def _layers_of(model: Any) -> Callable[[str], str]:
    """The layer of a tensor: the block that it is part of, or else its own module.

    All tensors are one layer if transformers' conversion of single layers is not that of all: a
    rule could join tensors of several.
    """
    from transformers.core_model_loading import revert_weight_conversion

    blocks = set(blocks_of(model))
    names = {name for name, module in model.named_modules() if module in blocks}

    def layer_of(name: str) -> str:
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((prefix for prefix in prefixes if prefix in names), name.rpartition(".")[0])

    if model not in _BY_LAYER:
        empty = {
            name.replace(BASE, "."): torch.empty(tensor.shape, device="meta")
            for name, tensor in model_state(model)
            if LORA not in name
        }
        apart: dict[str, Any] = {}
        for _, some in groupby(empty, layer_of):
            apart |= revert_weight_conversion(model, {name: empty[name] for name in some})
        together = revert_weight_conversion(model, empty)
        _BY_LAYER[model] = _shapes(together) == _shapes(apart)
    return layer_of if _BY_LAYER[model] else lambda _: ""


def _shapes(tensors: dict[str, Any]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _full(tensor: torch.Tensor, dtype: torch.dtype | None, copied: bool) -> torch.Tensor:
    """The full tensor. A shard is gathered in ``dtype``, which moves fewer bytes."""
    if not is_sharded(tensor):
        return tensor.to(dtype or tensor.dtype, copy=copied)
    gathered = full_tensor(tensor.to(dtype or tensor.dtype))
    sharded: Any = tensor  # a gather from one rank returns that rank's own memory
    alone = sharded.device_mesh.shape[-1] == 1
    return gathered.clone() if copied and alone else gathered
