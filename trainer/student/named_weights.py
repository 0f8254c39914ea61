"""The model's weights under the names of its checkpoint, by which the engines load them.

parameters, buffers ──gather──► transformers' names ──revert conversion──► checkpoint names
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainer.student.adapters import adapter_state, plain_state
from trainer.student.sharding import full_tensor, is_sharded


def named_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that ``save_pretrained`` would write, as (name, full copy); adapters are merged.

    Parameters are in ``dtype``. Persistent buffers keep their own: engines have those of mixtures
    (the correction of a router's scores) in float32, whatever the dtype of their weights. And what
    of a layer is not sent, vLLM's reload may leave empty.

    A head tied to the embedding appears once, under the embedding's name. transformers fuses the
    experts of a mixture in memory; here each has its checkpoint name. Of a sharded model all full
    weights are in memory at once, in ``dtype``, and every other rank joins the gather
    (``Rank.join_gather``).
    """
    from transformers.core_model_loading import revert_weight_conversion

    copies = {
        name: _copied(tensor.detach(), dtype if isinstance(tensor, torch.nn.Parameter) else None)
        for name, tensor in plain_state(model)
    }
    yield from revert_weight_conversion(model, copies).items()


def adapter_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Full copies of the adapters alone, in ``dtype``, for engines that apply them."""
    yield from ((name, _copied(tensor, dtype)) for name, tensor in adapter_state(model))


def _copied(tensor: torch.Tensor, dtype: torch.dtype | None) -> torch.Tensor:
    """A full copy. A shard is gathered in ``dtype``, which moves fewer bytes."""
    if not is_sharded(tensor):
        return tensor.to(dtype or tensor.dtype, copy=True)
    gathered = full_tensor(tensor.to(dtype or tensor.dtype))
    sharded: Any = tensor  # a gather from one rank returns that rank's own memory
    return gathered.clone() if sharded.device_mesh.shape[-1] == 1 else gathered
