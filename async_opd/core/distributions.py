"""The versions of installed packages."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version


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
