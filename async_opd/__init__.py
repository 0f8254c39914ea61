"""async_opd: fully asynchronous, streaming on-policy distillation for language models.

``async_opd.distil`` is the Python API (docs/extending.md); its names are imported when they are
used, so that ``import async_opd`` imports no other package.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

__version__ = "0.2.0"
__all__ = ["Callback", "Summary", "__version__", "distil"]


def _guard_top_level_packages() -> None:
    """Refuses to run when a file or another distribution took one of our top-level names.

    ``trainer`` exists on package registries, and many scripts have a trainer.py beside them;
    without this check the first symptom would be an ImportError deep inside a Ray actor. See
    docs/adr/0001-top-level-packages.md.
    """
    here = Path(__file__).resolve().parent.parent
    for name in ("rollouter", "teachers", "trainer"):
        spec = importlib.util.find_spec(name)
        found = Path(spec.origin).resolve() if spec and spec.origin else None
        if found == here / name / "__init__.py":
            continue
        remedy = "install async_opd again"
        if found is not None and {"site-packages", "dist-packages"} & set(found.parts):
            remedy = (
                f"another distribution installs a package of that name: uninstall it (`pip "
                f"uninstall {name}`), or give async_opd a separate environment"
            )
        elif found is not None:
            mine = found.parent if found.name == "__init__.py" else found
            remedy = f"rename {mine}, or start Python in another folder"
        raise ImportError(
            f"async_opd needs its package {name!r} from {here / name}, but `import {name}` finds "
            f"{found or 'nothing'}\n    → {remedy}"
        )


_guard_top_level_packages()


def other_system() -> str:
    """Why async_opd does not run on this operating system, on one line; empty on Linux."""
    system = sys.platform
    found = {"darwin": "macOS", "win32": "Windows"}.get(system, system)
    where = "WSL 2" if found == "Windows" else "a virtual machine"
    why = f"async_opd runs on Linux, this is {found} → use a Linux machine, a container or {where}"
    return "" if system == "linux" else why


def __getattr__(name: str) -> Any:
    """The names of the API, which its module imports with all that it needs."""
    if name in ("Callback", "Summary", "distil"):
        if why := other_system():
            raise ImportError(why)
        return getattr(importlib.import_module("async_opd.api"), name)
    raise AttributeError(f"module 'async_opd' has no attribute {name!r}")
