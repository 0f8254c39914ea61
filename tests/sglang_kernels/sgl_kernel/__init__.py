"""Stands in place of SGLang's kernels for CPUs, which no package index has.

SGLang imports some names of them when it starts, and then computes with PyTorch wherever kernels
for AMX are missing. A kernel that is called although it is not here is an error.
"""

from collections.abc import Callable
from typing import NoReturn


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """A function that fails, in place of any kernel."""
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is not installed")

    return absent
