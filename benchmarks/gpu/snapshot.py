"""Copying a student's weights out: to pinned host memory, to pageable memory, and on the device.

The weights of a student, as ``Rank.weights`` yields them (bfloat16 on a GPU), are copied into host
tensors that are made once, and into new ones.

    gb_per_s   bytes copied over seconds, in 10^9 bytes
    ms         until the device and the host are done
    queued_ms  until the call returns: what a training thread would wait for
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.gpu.measuring import (
    Figures,
    Report,
    Skip,
    device_of,
    finish,
    milliseconds,
    parser,
    rounded,
)
from benchmarks.gpu.students import rank_of, student

SIZES = {"cuda": "qwen3-4b", "cpu": "tiny"}
Copy = Callable[[], object]


def copies(weights: list[torch.Tensor]) -> dict[str, Callable[[], Copy]]:
    """By name, what makes a way of copying; making it is not measured."""

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
    return rounded({"gb_per_s": nbytes / ms / 1e6, "ms": ms, "queued_ms": queued})


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    options = parser(__doc__).parse_args(arguments)
    device = device_of(options)
    report = Report("snapshot", device, options.seconds)
    shape = SIZES[device.type]
    rank = rank_of(student(shape, device), device)
    weights = [weight for _, weight in rank.weights()]
    gib = round(sum(weight.nbytes for weight in weights) / (1 << 30), 3)
    report.cell(
        lambda: rounded({"ms": milliseconds(device, lambda: list(rank.weights()), 3, 1)}),
        way="Rank.weights",
        shape=shape,
        gib=gib,
    )
    for name, make in copies(weights).items():
        report.cell(partial(measure, make, weights, device), way=name, shape=shape, gib=gib)
    report.end()


if __name__ == "__main__":
    main()
