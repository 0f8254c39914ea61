"""Moves a rank's tensors off its device and back: all between two steps, or moments during one.

    on the device: step ──offload──► host memory (pinned, on a GPU) ──onload──► the device, step

Parameters and modules stay the same objects: optimizer, tied weights and FSDP keep them.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.student.sharding import is_sharded, own_part, sharded_as


def move(module: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """Moves the module's parameters and buffers, and their optimizer's moments, to the device.

    The optimizer's scalars stay where they are: some optimizers need theirs on the host, others on
    the device; and so do the moments of ``HostMoments``.
    Every tensor is copied, also from a CPU to itself. Of a sharded module each rank moves its
    shards: FSDP2 takes the new memory in ``FSDPModule._apply``.
    """
    module._apply(lambda tensor: _copy(tensor, device))  # type: ignore[no-untyped-call]
    if isinstance(optimizer, HostMoments):
        return
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, torch.Tensor) and value.ndim:
                state[key] = _copy(value, device)


def park(module: torch.nn.Module) -> None:
    """Moves the shards of a module's parameters to host memory, where FSDP offloads them to.

    Those that were read there stay: a copy would take the memory twice.
    """

    def parked(tensor: torch.Tensor) -> torch.Tensor:
        moves = is_sharded(tensor) and tensor.device.type != "cpu"
        return _copy(tensor, torch.device("cpu")) if moves else tensor

    module._apply(parked)  # type: ignore[no-untyped-call]


def _copy(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The tensor in new memory of the device; of a shard, the same shard."""
    if is_sharded(tensor):
        return sharded_as(tensor, _copy(own_part(tensor.detach()), device))
    pinned = device.type == "cpu" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    copy = torch.empty_like(tensor.detach(), device=device, pin_memory=pinned)
    return copy.copy_(tensor.detach())


class HostMoments(torch.optim.Optimizer):
    """Another optimizer, whose moments are in host memory but for those of one parameter at a time.

    Each step copies every moment to the device and back.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        # not Optimizer's own: the parameters and moments are those of ``inner``
        self.inner = inner
        self.defaults, self.param_groups, self.state = (
            inner.defaults,
            inner.param_groups,
            inner.state,
        )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One step of the optimizer, parameter by parameter."""
        groups = self.inner.param_groups
        try:
            for group in groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self.inner.param_groups = [{**group, "params": [parameter]}]
                        self._step(parameter)
        finally:
            self.inner.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See Optimizer.zero_grad."""
        self.inner.zero_grad(set_to_none)

    def _step(self, parameter: torch.Tensor) -> None:
        self._move(parameter, parameter.device)
        self.inner.step()
        self._move(parameter, torch.device("cpu"))

    def _move(self, parameter: torch.Tensor, device: torch.device) -> None:
        state = self.state[parameter]
        state.update({key: _copy(value, device) for key, value in state.items() if value.ndim})
