"""The platform of a rank: a step has the same bits only where all of it is the same."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch
from torch import nn

from async_opd.observability.loggers.environment import cpu_name
from trainer.vision.parts import attention_of

LIBRARIES = ("async-opd", "torch", "transformers", "peft", "torchao")
"""Other versions of these may compute the same bits, and may not."""


def platform_of(model: nn.Module, device: torch.device, reduces_once: bool) -> dict[str, str]:
    """Versions of the libraries that are installed, the device, and what was chosen for it."""
    gpu = device.type == "cuda"
    capability = torch.backends.cpu.get_cpu_capability()
    return {
        **{name: found for name in LIBRARIES if (found := _version(name))},
        "device": torch.cuda.get_device_name(device) if gpu else f"{cpu_name()}, {capability}",
        "threads": str(torch.get_num_threads()),
        "attention": attention_of(model),
        "reduces gradients": "once a step" if reduces_once else "after each micro-batch",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
