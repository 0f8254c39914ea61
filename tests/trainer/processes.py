"""The same function in several processes joined by gloo, each with its rank."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch


def spread(
    ranks: int, work: Callable[[int], Any], folder: Path, timeout_s: float = 120
) -> list[Any]:
    """The result of every rank's ``work``; tensors, containers and plain values.

    AssertionError unless all end within the timeout.
    """
    context = get_context("fork")
    processes = [
        context.Process(target=partial(_run, rank, ranks, work, folder)) for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout_s)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert codes == [0] * ranks
    return [torch.load(folder / f"{rank}.pt", weights_only=True) for rank in range(ranks)]


def _run(rank: int, ranks: int, work: Callable[[int], Any], folder: Path) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    torch.save(work(rank), folder / f"{rank}.pt")
    dist.barrier()
    os._exit(0)  # gloo's threads may abort an interpreter that is finalized
