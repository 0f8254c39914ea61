"""The parts of a tensor that ranks hold: each element in one of them, or in one of each replica."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from trainer.student.sharding import own_part, own_slices

ROWS = (1, 2, 4, 7)


def full(rows: int) -> torch.Tensor:
    return torch.arange(rows * 3, dtype=torch.float32).view(rows, 3)


def parts(mesh: tuple[int, ...], rank: int, answer: Any) -> None:
    """Sends the slices and the part of each tensor, of one rank; the other ranks do not exist."""
    ranks = torch.Size(mesh).numel()
    distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    found = []
    for rows in ROWS:
        module = torch.nn.Module()
        module.weight = torch.nn.Parameter(full(rows))
        names = ("replicate", "shard")[-len(mesh) :]
        fully_shard(module, mesh=init_device_mesh("cpu", mesh, mesh_dim_names=names))
        held = own_part(module.weight.detach()).tolist()
        found.append(([(s.start, s.stop) for s in own_slices(module.weight)], held))
    answer.send(found)


@pytest.mark.parametrize("mesh", [(3,), (2, 2)], ids=str)
def test_every_element_is_in_the_part_of_one_rank_of_each_replica(mesh: tuple[int, ...]) -> None:
    context = multiprocessing.get_context("fork")  # torch remembers a mesh beyond its process group
    times = [torch.zeros_like(full(rows)) for rows in ROWS]
    for rank in range(torch.Size(mesh).numel()):
        answer, question = context.Pipe(duplex=False)
        process = context.Process(target=parts, args=(mesh, rank, question))
        process.start()
        question.close()
        for rows, seen, (slices, held) in zip(ROWS, times, answer.recv(), strict=True):
            own = tuple(slice(*one) for one in slices)
            assert full(rows)[own].tolist() == held
            seen[own] += 1
        process.join()
    replicas = mesh[0] if len(mesh) == 2 else 1
    assert all(seen.unique().tolist() == [replicas] for seen in times)


def test_an_unsharded_tensor_is_its_own_part() -> None:
    tensor = torch.zeros(2, 3)
    assert own_slices(tensor) == (slice(0, 2), slice(0, 3))
    assert own_part(tensor) is tensor
