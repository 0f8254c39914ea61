"""A step's use of its devices: FLOP/s, their share of the peak, and GPU memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple, dataclass

import torch

GIB = float(1 << 30)

PEAK_TFLOPS = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.0),
    ("H200 NVL", 835.0),
    ("H200", 989.0),
    ("H100 NVL", 835.0),
    ("H100 PCIe", 756.0),
    ("H100", 989.0),
    ("H20", 148.0),
    ("A100", 312.0),
    ("A30", 165.0),
    ("A40", 150.0),
    ("L40S", 362.0),
    ("L40", 181.0),
    ("L4", 121.0),
    ("RTX 4090", 165.0),
)
"""Dense bfloat16 TFLOP/s by words of the device's name, from the vendor's data sheets (those with
a star in a sheet, for sparse matrices, are halved). The first name that fits counts."""


def peak_tflops(device: torch.device, bfloat16: bool, given: float | None) -> float | None:
    """The device's TFLOP/s in the precision of training: ``given``, or by its name.

    None if nothing is given and the device is not in the table, or training is not bfloat16.
    """
    if given is not None or device.type != "cuda" or not bfloat16:
        return given
    words = torch.cuda.get_device_name(device).replace("-", " ").split()
    for name, peak in PEAK_TFLOPS:
        if set(name.split()) <= set(words):
            return peak
    return None


def utilization(
    flops: float | None, seconds: float, ranks: int, peak: float | None
) -> dict[str, float]:
    """``train/tflops`` of each rank's device, in the mean; ``train/mfu``, their share of ``peak``.

    Without a ``peak`` (TFLOP/s) there is no ``train/mfu``, and without ``flops`` neither.
    """
    if flops is None:
        return {}
    reached = flops / seconds / ranks / 1e12
    metrics = {"train/tflops": reached}
    return metrics if peak is None else {**metrics, "train/mfu": reached / peak}


@dataclass(frozen=True)
class MemoryUse:
    """Bytes of a GPU that torch's tensors had: now, and most since the last reading.

    ``outside``: bytes in use that torch has not taken: CUDA's context, communicators of NCCL, and
    all of other processes.
    """

    now: int
    peak: int
    outside: int


def memory_use(device: torch.device) -> MemoryUse | None:
    """Reads the device's memory and starts a new peak; None on a CPU."""
    if device.type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info(device)
    used = MemoryUse(
        torch.cuda.memory_allocated(device),
        torch.cuda.max_memory_allocated(device),
        total - free - torch.cuda.memory_reserved(device),
    )
    torch.cuda.reset_peak_memory_stats(device)
    return used


def memory_metrics(uses: Sequence[MemoryUse | None]) -> dict[str, float]:
    """The most of all ranks and, of several ranks, that of each; nothing from a CPU."""
    known = {rank: use for rank, use in enumerate(uses) if use is not None}
    if not known:
        return {}
    most = MemoryUse(*map(max, zip(*map(astuple, known.values()), strict=True)))
    named = {"train": most}
    if len(uses) > 1:
        named |= {f"train/rank/{rank}": use for rank, use in known.items()}
    return {
        key: value / GIB
        for prefix, use in named.items()
        for key, value in (
            (f"{prefix}/gpu_memory_gib", use.now),
            (f"{prefix}/gpu_memory_peak_gib", use.peak),
            (f"{prefix}/gpu_memory_outside_gib", use.outside),
        )
    }
