"""When gradients are summed over the ranks: once a step, or after each micro-batch.

    step         micro-batch ─► full gradients ─► + micro-batch ─► … ─► reduce-scatter ─► shards
    micro_batch  micro-batch ─► reduce-scatter ─► shards ─► + micro-batch ─► reduce-scatter ─► …

Once a step each rank keeps the full gradients of all parameters, float32, meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from async_opd.config.device_defaults import reduces_once

if TYPE_CHECKING:
    from async_opd.config.sections.train import TrainConfig
    from trainer.student.loss_module import StudentLoss

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
