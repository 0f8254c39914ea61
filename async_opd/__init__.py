"""async_opd: fully asynchronous, streaming on-policy distillation for language models."""

from __future__ import annotations

import importlib.util
from pathlib import Path

__version__ = "0.1.0"


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
                f"an environment of its own."
            )


_guard_top_level_packages()
