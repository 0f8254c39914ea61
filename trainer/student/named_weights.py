"""The model's weights under the names of its checkpoint, by which the engines load them.

parameters ──gather──► transformers' names ──revert conversion──► checkpoint names
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainer.student.sharding import full_tensor, is_sharded


def named_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that ``save_pretrained`` would write, as (name, full copy in ``dtype``).

    A head tied to the embedding appears once, under the embedding's name. transformers fuses the
    experts of a mixture in memory; here each has its checkpoint name. Of a sharded model all full
    weights are in memory at once, in ``dtype``, and every other rank joins the gather
    (``Rank.join_gather``).
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights = {
        name: _full_weight(parameter.detach(), dtype)
        for name, parameter in model.named_parameters()  # a tied parameter appears once
    }
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    weights = revert_weight_conversion(model, weights)
    for name in list(weights):
        yield name, weights.pop(name).to(dtype, copy=not sharded)


def _full_weight(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A sharded weight gathered in ``dtype``, which moves fewer bytes; another one as it is."""
    return full_tensor(weight.to(dtype)) if is_sharded(weight) else weight
