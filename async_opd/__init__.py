"""async_opd: fully asynchronous, streaming on-policy distillation for language models.

``async_opd.distil`` is the Python API (docs/extending.md); its names are imported when they are
used, so that ``import async_opd`` imports no other package.
"""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

__version__ = "0.1.0"
__all__ = ["Callback", "Summary", "__version__", "distil"]


def _guard_top_level_packages() -> None:
    """Refuses to run when another distribution's package took one of our top-level names.

    ``trainer`` exists on package registries; without this check the first symptom would be an
    ImportError deep inside a Ray actor. See docs/adr/0001-top-level-packages.md.
    """
    here = Path(__file__).resolve().parent.parent
    for name in ("rollouter", "teachers", "trainer"):
        spec = importlib.util.find_spec(name)
        won = Path(spec.origin).resolve().parent if spec and spec.origin else None
        if won != here / name:
            raise ImportError(
                f"async_opd needs its own top-level package {name!r} from {here / name}, but "
                f"`import {name}` finds {won or 'nothing'}. Another distribution installs a "
                f"package of that name: uninstall it (`pip uninstall {name}`), or give async_opd "
                f"a separate environment."
            )


_guard_top_level_packages()


def __getattr__(name: str) -> Any:
    """The names of the API, which its module imports with all that it needs."""
    if name in ("Callback", "Summary", "distil"):
        return getattr(importlib.import_module("async_opd.api"), name)
    raise AttributeError(f"module 'async_opd' has no attribute {name!r}")
