"""The model's weights under the names of its checkpoint, which are those the engines load by.

parameters ──strip wrappers, gather──► transformers' names ──revert conversion──► checkpoint names
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from trainer.student.sharding import full_tensor, is_sharded

WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def named_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """What ``save_pretrained`` would write, as (name, tensor in ``dtype``): copies, whole ones.

    A head tied to the embedding appears once, under the embedding's name. transformers fuses the
    experts of a mixture in memory; here they have their own names again. Of a sharded model all
    weights are in memory at once, in ``dtype``; the other ranks lend theirs
    (``trainer.student.sharding``).
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights = {
        unwrapped(name): _taken(parameter.detach(), dtype)
        for name, parameter in model.named_parameters()  # a tied parameter appears once
    }
    sharded = any(is_sharded(parameter) for parameter in model.parameters())
    weights = revert_weight_conversion(model, weights)
    for name in list(weights):
        yield name, weights.pop(name).to(dtype, copy=not sharded)


def _taken(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """One that is sharded is gathered in the type that is wanted."""
    return full_tensor(weight.to(dtype)) if is_sharded(weight) else weight


def unwrapped(name: str) -> str:
    """The name without the prefixes of FSDP, torch.compile and activation checkpointing."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
