"""A device that is a CPU, and counts what the host would wait for if it were a GPU.

    torch operation ──mode──► the same on the CPU tensors within ──► tensors of the device
                        └── a value that the host reads, a copy from pageable memory ──► waits

A GPU's operations run behind the host until it needs a value or a size, or a copy between them that
blocks, or whose host memory is not pinned.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    return_and_correct_aliasing,
)
from torch.utils._pytree import tree_leaves, tree_map_only

NAME = "pretended"
READ = {"_local_scalar_dense", "nonzero", "masked_select", "equal", "_unique2", "is_nonzero"}
"""Operations whose result, or its size, the host reads; and ``index`` by a mask."""


@cache
def device() -> torch.device:
    """The device. torch knows it from now on, in all of a process that has had no backward pass."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(rename=NAME)
    module: Any = getattr(torch, NAME)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16]
    return torch.device(NAME, 0)


class OnDevice(torch.Tensor):
    """A tensor of the device, whose values are those of ``own`` on the CPU."""

    own: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, own: torch.Tensor) -> Any:
        layout: Any = {"strides": own.stride(), "storage_offset": own.storage_offset()}
        made = torch.Tensor._make_wrapper_subclass(
            cls, own.size(), dtype=own.dtype, device=device(), **layout
        )
        made.own = own
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, *_: Any, **__: Any) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} outside of the mode that counts")


class Waits(TorchDispatchMode):
    """Its block's operations for which the host waits, in order: ``found``."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self._pinned: dict[int, torch.Tensor] = {}

    def pin(self, tensor: torch.Tensor) -> torch.Tensor:
        """In the place of ``torch.Tensor.pin_memory``."""
        made = tensor.clone()
        self._pinned[made.untyped_storage().data_ptr()] = made
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given, name = kwargs or {}, func._schema.name.removeprefix("aten::")
        tensors = [one for one in tree_leaves((args, given)) if isinstance(one, torch.Tensor)]
        goes = there = any(isinstance(one, OnDevice) for one in tensors)
        if (asked := given.get("device")) is not None:
            goes = torch.device(asked).type == NAME
        if there and (name in READ or (name == "index" and by_mask(args[1]))):
            self.found.append(name)
        ends = goes, *(isinstance(one, OnDevice) for one in tensors)
        if name in ("_to_copy", "copy_") and len(set(ends)) == 2:
            background = given.get("non_blocking") or args[2:3] == (True,)
            host = [one for one in tensors if not isinstance(one, OnDevice)]
            pinned = all(one.untyped_storage().data_ptr() in self._pinned for one in host)
            if not (background and host and pinned):
                self.found.append(f"{name} {'to' if goes else 'from'} the device")
        on_cpu = given | ({"device": "cpu"} if asked is not None and goes else {})
        inner: Any = tree_map_only(OnDevice, lambda one: one.own, (args, on_cpu))
        with _disable_current_modes():
            made = func(*inner[0], **inner[1])
        if not goes:
            return made
        made = tree_map_only(torch.Tensor, OnDevice, made)
        return return_and_correct_aliasing(func, args, given, made)


def by_mask(indices: Any) -> bool:
    return any(one is not None and one.dtype == torch.bool for one in indices)
