"""Time, memory and the report of the measurements on a GPU."""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import async_opd
from trainer.notes import drain_notes

GIB = float(1 << 30)
MATRIX = {"cuda": 8192, "cpu": 256}
"""Rows and columns of the matrices whose product is the device's measured peak."""
PACKAGES = ("torch", "transformers", "triton", "numpy")

Figures = dict[str, Any]


def parser(about: str | None) -> argparse.ArgumentParser:
    """The options that every script has."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawTextHelpFormatter)
    made.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    made.add_argument("--seconds", type=float, default=600, help="no cell begins after these")
    return made


def device_of(options: argparse.Namespace) -> torch.device:
    """The device that the options name. SystemExit without a GPU."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("torch finds no GPU here: --device cpu runs small sizes on the CPU")
    if options.device == "cpu":
        torch.set_num_threads(1)
    return torch.device(options.device)


def device_name(device: torch.device) -> str:
    """The GPU's or the processor's name."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return platform.processor() or platform.machine()


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
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


@dataclass
class Report:
    """The cells of one script, in order; each is printed as soon as it is measured."""

    name: str
    device: torch.device
    seconds: float = 600.0
    cells: list[Figures] = field(default_factory=list)
    failed: bool = False
    started: float = field(default_factory=time.perf_counter)

    def cell(self, work: Callable[[], Figures], **what: Any) -> None:
        """Measures one cell, which ``what`` names.

        ``notes`` are the trainer's lines for ``run.log``. A cell without figures says why:
        ``skipped`` (a reason that was known before, a Skip), or ``out_of_memory``, or ``failed``,
        after which the script's exit code is 1. A figure that is None is left out.
        """
        if time.perf_counter() - self.started > self.seconds:
            found: Figures = {"skipped": f"its {self.seconds:g} seconds were over"}
        else:
            found = _figures(work)
        if notes := drain_notes():
            found["notes"] = "; ".join(notes)
        self.failed |= "failed" in found
        self.cells.append({**what, **{key: v for key, v in found.items() if v is not None}})
        print(json.dumps({"cell": self.cells[-1]}), flush=True)
        _free(self.device)

    def end(self) -> None:
        """Prints everything. SystemExit if a cell failed."""
        print(json.dumps(self.everything()), flush=True)
        if self.failed:
            raise SystemExit(1)

    def everything(self) -> Figures:
        """The last line of the script."""
        gpu = self.device.type == "cuda"
        memory = torch.cuda.get_device_properties(self.device).total_memory if gpu else 0
        return {
            "name": self.name,
            "device": self.device.type,
            "device_name": device_name(self.device),
            **({"device_gib": round(memory / GIB, 1)} if gpu else {}),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "versions": versions(self.device),
            "cells": self.cells,
        }


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
        return {"failed": f"{type(error).__name__}: {error}"[:500]}


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


def matmul_tflops(device: torch.device, dtype: torch.dtype) -> float:
    """TFLOP/s of a product of two large square matrices: the peak that utilization refers to."""
    size = MATRIX[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    out = torch.empty_like(left)
    return 2 * size**3 / milliseconds(device, lambda: torch.mm(left, right, out=out)) / 1e9


def rounded(figures: Figures, digits: int = 4) -> Figures:
    """The same with ``digits`` significant digits."""
    return {
        key: float(f"{value:.{digits}g}") if isinstance(value, float) else value
        for key, value in figures.items()
    }


def positive(values: str) -> Sequence[int]:
    """``4096,8192`` as numbers, for an option."""
    return tuple(int(value) for value in values.split(","))
