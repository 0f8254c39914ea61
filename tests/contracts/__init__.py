"""What async_opd needs of libraries that it does not own, held without a GPU.

Each test names the function that it holds to, and says so when another version has changed it.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def contract(function: str, needs: str) -> Iterator[None]:
    """An error of the body becomes one that names the function, its version, and what is needed.

    ``function``: its full name, such as ``vllm.utils.torch_utils.current_stream``. ``needs``
    completes "async_opd needs that it …".
    """
    try:
        yield
    except Exception as error:
        package = function.partition(".")[0]
        version: Any = getattr(importlib.import_module(package), "__version__", "?")
        raise AssertionError(
            f"{function} of {package} {version} has changed: async_opd needs that it {needs}. "
            f"Found: {type(error).__name__}: {error}"
        ) from error
