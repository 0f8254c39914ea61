"""Shards the student over the trainer's ranks with FSDP2, and gathers full tensors of it.

    rank 0 ─┐ one process group ──fully_shard──► each rank has its rows of every parameter
    rank 1 ─┘                                    (and of gradients and the optimizer's moments)

Every function that takes or returns a full tensor of a shard is a collective: all ranks call it in
the same order. Without sharding none communicates.

Gradients are summed over the ranks once a step, or after each micro-batch:

    step         micro-batch ─► full gradients ─► + micro-batch ─► … ─► reduce-scatter ─► shards
    micro_batch  micro-batch ─► reduce-scatter ─► shards ─► + micro-batch ─► reduce-scatter ─► …

Once a step each rank keeps the full gradients of all parameters, float32, meanwhile.

Each rank holds a part of a full tensor (``own_part``):

    full tensor [8, 4] over 3 ranks:  rank 0 rows 0:3 · rank 1 rows 3:6 · rank 2 rows 6:8

Nothing here communicates. Without sharding the part is the whole tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from async_opd.config.device_defaults import reduces_once
from async_opd.core.errors import StageError
from async_opd.core.stages import TRAINER
from async_opd.weight_sync.rendezvous import all_know_secret
from trainer.rank_group import RankSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from async_opd.config.sections.train import TrainConfig
    from trainer.student.loss_module import StudentLoss


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
    meta = TensorMeta(size, torch.empty(size, device="meta").stride(), own.dtype)
    spec = DTensorSpec(sharded.device_mesh, sharded.placements, meta)
    return DTensor(own, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def join_mesh(spec: RankSpec, device: torch.device, replicate: int = 1) -> DeviceMesh:
    """Connects this rank to the others; returns the mesh of all. RuntimeError after the timeout.

    With ``replicate`` copies of the shards it has a dimension of copies before that of shards.
    StageError if one of them does not prove that it knows the spec's secret.
    """
    from torch.distributed import (  # type: ignore[attr-defined]
        TCPStore,
        group,
        init_process_group,
    )
    from torch.distributed.device_mesh import init_device_mesh

    bound, start = timedelta(seconds=spec.timeout_s), timedelta(seconds=spec.start_s)
    store = TCPStore(
        spec.host,
        spec.port,
        spec.ranks,
        is_master=spec.rank == 0,
        timeout=start,
        master_listen_fd=spec.listener,
    )
    backend = _backend(device)
    init_process_group(backend, store=store, rank=spec.rank, world_size=spec.ranks, timeout=bound)
    if not all_know_secret(torch, group.WORLD, spec.rank, spec.ranks, spec.secret, device.type):
        cause = f"one of its {spec.ranks} ranks failed to prove that it knows the run's secret"
        remedy = "a process outside of this run took a rank's place: look for it on this network"
        raise StageError(TRAINER, cause, remedy)
    if replicate == 1:
        return init_device_mesh(device.type, (spec.ranks,))
    shape, names = (replicate, spec.ranks // replicate), ("replicate", "shard")
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for of_ranks in mesh.get_all_groups():
        of_ranks.set_timeout(bound)  # else torch's own, 10 or 30 minutes
    return mesh


def await_ranks(spec: RankSpec, what: str) -> None:
    """Returns when all ranks have called it; RuntimeError after ``spec.start_s`` seconds.

    Ranks read their weights at different speeds, and a collective ends after its own bound.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    store.set(f"{what}/{spec.rank}", "")
    keys = [f"{what}/{rank}" for rank in range(spec.ranks)]
    store.wait(keys, timedelta(seconds=spec.start_s))


def lone_mesh(device: torch.device) -> DeviceMesh:
    """The mesh of a single rank, for what only FSDP does: offloading parameters."""
    from torch.distributed import HashStore, init_process_group  # type: ignore[attr-defined]
    from torch.distributed.device_mesh import init_device_mesh

    init_process_group(_backend(device), store=HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (1,))


def _backend(device: torch.device) -> str:
    """NCCL on GPUs, and gloo for what is on their hosts: gradient norms of offloaded parameters."""
    return "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"


def shard(student: StudentLoss, mesh: DeviceMesh, *, bfloat16: bool, offload: bool = False) -> None:
    """Shards each block of the decoder, then the head, then all other parameters.

    A head that is tied to the embedding is gathered with it. With ``bfloat16``, parameters are
    gathered and used in bfloat16 and gradients are reduced in float32; inputs keep their type:
    otherwise FSDP would round the loss's inputs too, such as the teacher's scores. With
    ``offload`` shards, gradients and moments are in host memory, pinned for a GPU.
    """
    from torch.distributed.fsdp import (
        CPUOffloadPolicy,
        MixedPrecisionPolicy,
        OffloadPolicy,
        fully_shard,
    )

    policy = MixedPrecisionPolicy()
    if bfloat16:
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
    home = CPUOffloadPolicy(mesh.device_type == "cuda") if offload else OffloadPolicy()
    modules = blocks_of(student.decoder)
    if student.head.linear.weight is not student.decoder.get_input_embeddings().weight:
        modules.append(student.head)
    for module in (*modules, student):
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=home)


def blocks_of(model: Any) -> list[torch.nn.Module]:
    """The modules that are gathered as one: what transformers does not split over devices."""
    kinds = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in kinds]


def is_sharded(tensor: torch.Tensor) -> bool:
    """Whether this rank has only a part of the tensor."""
    return hasattr(tensor, "full_tensor")


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The full tensor, gathered from all ranks; the tensor itself if it is not sharded.

    It is on the ranks' device, also if their shards are offloaded. A single rank has all of it, and
    leaves it where it is: the GPU may be in use by others.
    """
    if not is_sharded(tensor):
        return tensor
    sharded: Any = tensor
    if sharded.device_mesh.size() == 1:
        return sharded.to_local()  # type: ignore[no-any-return]
    return sharded.to(sharded.device_mesh.device_type).full_tensor()  # type: ignore[no-any-return]


def reshard(student: StudentLoss) -> None:
    """Frees the gathered parameters that a forward pass without a backward pass has left."""
    sharded: Any
    for sharded in student.modules():
        if hasattr(sharded, "reshard"):
            sharded.reshard()


T = TypeVar("T")


def all_reduce_once(train: TrainConfig, student: StudentLoss, device: torch.device) -> bool:
    """Whether the ranks reduce once a step. With several ranks a collective: all have to agree.

    By ``auto`` where the full gradients fit the memory of every rank; see ``reduces_once``.
    """
    entries = sum(p.numel() for p in student.parameters() if p.requires_grad)
    ranks = torch.distributed.get_world_size()
    agreed = torch.tensor(int(reduces_once(train, entries, _memory(device, ranks))), device=device)
    torch.distributed.all_reduce(agreed, torch.distributed.ReduceOp.MIN)
    return bool(agreed)


def reducing_last(student: StudentLoss, micro_batches: Sequence[T]) -> Iterator[T]:
    """The micro-batches; FSDP reduces gradients in the backward pass of the last one only."""
    sharded: Any = student
    for left, micro_batch in enumerate(micro_batches, 1 - len(micro_batches)):
        sharded.set_requires_gradient_sync(left == 0)
        sharded.set_is_last_backward(left == 0)
        yield micro_batch


def _memory(device: torch.device, ranks: int) -> int:
    """Bytes of a GPU; of a host, each rank's part, as if all ranks were on it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // ranks
