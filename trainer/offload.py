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
                        self._move(parameter, parameter.device)
                        self.inner.step()
                        self._move(parameter, torch.device("cpu"))
        finally:
            self.inner.param_groups = groups

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See Optimizer.zero_grad."""
        self.inner.zero_grad(set_to_none)

    def _move(self, parameter: torch.Tensor, device: torch.device) -> None:
        state = self.state[parameter]
        state.update({key: _copy(value, device) for key, value in state.items() if value.ndim})


class HostBuffers:
    """Host memory for copies of many tensors, again and again; pinned where they are on a GPU.

    Tensors lie one behind the other as ``weight_sync.layout.chunk_plan`` divides them, so that no
    byte of a chunk is copied again to be sent. Each buffer has room for a chunk, or for one larger
    tensor. Copies of the same sizes, in the same order, are all in the same memory.
    """

    def __init__(self, chunk_bytes: int) -> None:
        self._chunk_bytes = chunk_bytes
        self._buffers: list[torch.Tensor] = []
        self._chunk = self._filled = 0

    def clear(self) -> None:
        """The next copy is the first again, in the memory of the one before."""
        self._chunk = self._filled = 0

    def give_up(self) -> None:
        """The next copies are in other memory; that of these is freed when no caller reads it."""
        self._buffers = []
        self.clear()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """The copy, which a GPU may still be making when this returns.

        A view of the buffer in the tensor's dtype and shape, or of its bytes where these do not
        lie at an address that suits the dtype.
        """
        data = tensor.detach().contiguous().view(-1).view(torch.uint8)
        size = data.numel()
        if self._filled and self._filled + size > self._chunk_bytes:
            self._chunk, self._filled = self._chunk + 1, 0
        known = self._buffers[self._chunk].numel() if self._chunk < len(self._buffers) else -1
        if self._filled + size > known:
            room = max(size, self._chunk_bytes)
            buffer = torch.empty(room, dtype=torch.uint8, pin_memory=data.is_cuda)
            self._buffers[self._chunk :] = [buffer, *self._buffers[self._chunk + 1 :]]
        copied = self._buffers[self._chunk][self._filled : self._filled + size]
        copied.copy_(data, non_blocking=True)
        aligned = self._filled % tensor.dtype.itemsize == 0
        self._filled += size
        return copied.view(tensor.dtype).view(tensor.shape) if aligned else copied
