"""What hardware there is, without torch."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from pathlib import Path

from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, Problem
from async_opd.models.engine_args import Device

NVIDIA_SMI_TIMEOUT_S = 20
DRIVER = Path("/proc/driver/nvidia/gpus")


def gpu_count() -> int:
    """NVIDIA GPUs this process may use: CUDA_VISIBLE_DEVICES, else the driver's list.

    As CUDA does, the variable is read up to its first ``-1`` or empty entry. Raises ConfigError if
    the driver does not answer: falling back to the CPU would be a silent change of the run.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        entries = (entry.strip() for entry in visible.split(","))
        return sum(1 for _ in itertools.takewhile(lambda e: e not in ("", "-1"), entries))
    if DRIVER.is_dir():
        return len(list(DRIVER.iterdir()))
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        message = f"nvidia-smi -L did not answer: {error}"
        remedy = "mend the driver, or set cluster.device to cpu and CUDA_VISIBLE_DEVICES to ''"
        raise ConfigError([Problem("this machine", "cluster.device", message, remedy)]) from error
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def resolve_device(config: RunConfig, gpus: int | None = None) -> Device:
    """The device of all pools; ``auto`` is cuda where there is a GPU or another cluster."""
    if config.cluster.device != "auto":
        return config.cluster.device
    found = gpu_count() if gpus is None else gpus
    return "cuda" if found or config.cluster.address else "cpu"
