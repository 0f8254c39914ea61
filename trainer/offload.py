"""Moves a rank's tensors off its device and back, between two steps.

    on the device: step ──offload──► host memory (pinned, on a GPU) ──onload──► the device, step

Parameters and modules stay the same objects: optimizer, tied weights and FSDP keep them.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.student.sharding import is_sharded


def move(module: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves the module's parameters and buffers, and their optimizer's moments, to the device.

    The optimizer's scalars stay where they are: some optimizers need theirs on the host, others on
    the device.
    Every tensor is copied, also from a CPU to itself. Of a sharded module each rank moves its
    shards: FSDP2 takes the new memory in ``FSDPModule._apply``.
    """
    module._apply(lambda tensor: _copy(tensor, device))  # type: ignore[no-untyped-call]
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                state[key] = _copy(value, device)


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor in new memory of the device; of a shard, the same shard."""
    if is_sharded(tensor):
        shard: Any = tensor
        return type(shard.data)(  # type: ignore[no-any-return]
            _copy(shard._local_tensor, device), shard._spec, requires_grad=False
        )
    pinned = device.type == "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    copy = torch.empty_like(tensor.detach(), device=device, pin_memory=pinned)
    return copy.copy_(tensor.detach())
