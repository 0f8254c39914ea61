"""Which part of a full tensor this rank holds.

    full tensor [8, 4] over 3 ranks:  rank 0 rows 0:3 · rank 1 rows 3:6 · rank 2 rows 6:8

Nothing here communicates. Without sharding the part is the whole tensor.
"""

from __future__ import annotations

from typing import Any

import torch

from trainer.student.sharding import is_sharded


def own_slices(tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> tuple[slice, ...]:
    """The part of the full tensor in this rank, one slice a dimension; empty ones hold nothing.

    ``shape`` is that of another full tensor, which is sharded as this one; by default its own.
    Over a mesh with a dimension that replicates, several ranks have the same part.
    """
    if not is_sharded(tensor):
        return tuple(slice(0, size) for size in shape or tensor.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded: Any = tensor
    sizes, starts = compute_local_shape_and_global_offset(
        shape or tensor.shape, sharded.device_mesh, sharded.placements
    )
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


def own_part(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part, in the tensor's own memory."""
    return tensor.to_local() if is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def sharded_as(
    tensor: torch.Tensor, own: torch.Tensor, shape: tuple[int, ...] | None = None
) -> torch.Tensor:
    """A full tensor of which this rank has ``own``, sharded as this one is; ``shape`` as above.

    ``DTensor.from_local`` would move it to the device of the mesh; here it stays where it is.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    sharded: Any = tensor
    size = torch.Size(shape or tensor.shape)
    stride = torch.empty(size, device="meta").stride()
    meta = TensorMeta(size, stride, own.dtype)
    spec = DTensorSpec(sharded.device_mesh, sharded.placements, meta)
    return DTensor(own, spec, requires_grad=False)  # type: ignore[no-untyped-call]
