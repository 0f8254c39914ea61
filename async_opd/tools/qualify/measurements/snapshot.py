"""Copying a student's weights out: to pinned host memory, to pageable memory, and on the device.

The weights of a student, as ``FullWeights.sent`` yields them (bfloat16 on a GPU), are copied into
tensors that are made once, and into new ones.

    gb_per_s   bytes copied over seconds, in 10^9 bytes
    ms         until the device and the host are done
    queued_ms  until the call returns: what a training thread would wait for

Then memory that no allocator of the GPU counts: ``context_gib``, a second process's CUDA context;
``pinned_ratio``, the host memory that torch pins for tensors over their bytes.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from async_opd.tools.qualify.measurements.measuring import (
    Figures,
    Report,
    Skip,
    finish,
    milliseconds,
    used_gib,
)
from async_opd.tools.qualify.measurements.students import rank_of, student

SIZES = {"cuda": "qwen3-4b", "cpu": "tiny"}
Copy = Callable[[], object]


def copies(weights: list[torch.Tensor]) -> dict[str, Callable[[], Copy]]:
    """Makers of the ways of copying, by name; making one is not measured."""

    def into(pinned: bool) -> Copy:
        if pinned and not weights[0].is_cuda:
            raise Skip("pinned memory needs a GPU")
        room = [torch.empty(w.shape, dtype=w.dtype, pin_memory=pinned) for w in weights]

        def work() -> None:
            for there, weight in zip(room, weights, strict=True):
                there.copy_(weight, non_blocking=True)

        return work

    return {
        "pinned, made once": lambda: into(True),
        "pageable, made once": lambda: into(False),
        "pageable, new": lambda: lambda: [weight.to("cpu", copy=True) for weight in weights],
        "device, new": lambda: lambda: [weight.clone() for weight in weights],
    }


def measure(make: Callable[[], Copy], weights: list[torch.Tensor], device: torch.device) -> Figures:
    """Speed of one way."""
    work = make()
    ms = milliseconds(device, work, repeats=3, warm_up=1)
    started = time.perf_counter()
    work()
    queued = 1e3 * (time.perf_counter() - started)
    finish(device)
    nbytes = sum(weight.nbytes for weight in weights)
    return {"gb_per_s": nbytes / ms / 1e6, "ms": ms, "queued_ms": queued}


PINNED = (3 << 20, 100 << 20, 700 << 20)
"""Bytes of tensors; none is a power of two."""
TIMEOUT_S = 60.0


def pinned(device: torch.device) -> Figures:
    """Of each of PINNED the host memory that is taken, as torch counts it."""
    if device.type != "cuda":
        raise Skip("pinned memory needs a GPU")
    before = torch.cuda.host_memory_stats()["allocated_bytes.current"]
    kept = [torch.empty(size, dtype=torch.uint8, pin_memory=True) for size in PINNED]
    taken = torch.cuda.host_memory_stats()["allocated_bytes.current"] - before
    return {"pinned_ratio": taken / sum(one.nbytes for one in kept)}


def hold_context(there: Any) -> None:
    """Has a context on the first GPU until the process is killed."""
    torch.zeros(1, device="cuda")
    there.send("made")
    there.poll(TIMEOUT_S)


def context(device: torch.device) -> Figures:
    """Of another process."""
    if device.type != "cuda":
        raise Skip("a CUDA context needs a GPU")
    before, spawn = used_gib()[0], multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=hold_context, args=(there,), daemon=True)
    process.start()
    try:
        if not here.poll(TIMEOUT_S):
            raise TimeoutError(f"the process has made no context within {TIMEOUT_S:g} s")
        return {"context_gib": used_gib()[0] - before}
    finally:
        process.kill()
        process.join()


def main(report: Report) -> None:
    """See the module."""
    device = report.device
    shape = SIZES[device.type]
    rank = rank_of(student(shape, device), device)
    weights = [weight for _, weight in rank.weights.sent()]
    gib = round(sum(weight.nbytes for weight in weights) / (1 << 30), 3)
    # first: memory that is freed later stays pinned, and would be taken again
    report.cell(partial(pinned, device), what="bytes", of="pinned")
    report.cell(
        lambda: {"ms": milliseconds(device, lambda: list(rank.weights.sent()), 3, 1)},
        way="FullWeights.sent",
        shape=shape,
        gib=gib,
    )
    for name, make in copies(weights).items():
        report.cell(partial(measure, make, weights, device), way=name, shape=shape, gib=gib)
    report.cell(partial(context, device), what="bytes", of="context")
