"""The model's weights under the names of its checkpoint, which are those the engines load by.

parameters ──strip wrappers──► transformers' names ──revert conversion──► checkpoint names
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

WRAPPERS = ("_fsdp_wrapped_module.", "_orig_mod.", "_checkpoint_wrapped_module.")


def named_weights(model: Any, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """What ``save_pretrained`` would write, as (name, tensor in ``dtype``), without gradient.

    A head tied to the embedding appears once, under the embedding's name. Tensors may share memory
    with the model: copy them before the next step. transformers fuses the experts of a mixture in
    memory; here they have their own names again.
    """
    from transformers.core_model_loading import revert_weight_conversion

    weights = {
        unwrapped(name): parameter.detach()
        for name, parameter in model.named_parameters()  # a tied parameter appears once
    }
    for name, weight in revert_weight_conversion(model, weights).items():
        yield name, weight.to(dtype)


def unwrapped(name: str) -> str:
    """The name without the prefixes of FSDP, torch.compile and activation checkpointing."""
    for wrapper in WRAPPERS:
        name = name.replace(wrapper, "")
    return name
