"""What hardware there is, without torch."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from async_opd.core.config import RunConfig
from async_opd.core.engine_args import Device

NVIDIA_SMI_TIMEOUT_S = 20


def gpu_count() -> int:
    """NVIDIA GPUs this process may use: CUDA_VISIBLE_DEVICES, else the driver's list."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([entry for entry in visible.split(",") if entry.strip() not in ("", "-1")])
    driver = Path("/proc/driver/nvidia/gpus")
    if driver.is_dir():
        return len(list(driver.iterdir()))
    if shutil.which("nvidia-smi") is None:
        return 0
    try:
        listed = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    return sum(line.startswith("GPU ") for line in listed.stdout.splitlines())


def resolve_device(config: RunConfig, gpus: int | None = None) -> Device:
    """The device of all pools; ``auto`` is cuda where there is a GPU or another cluster."""
    if config.cluster.device != "auto":
        return config.cluster.device
    found = gpu_count() if gpus is None else gpus
    return "cuda" if found or config.cluster.address else "cpu"
