"""The needs of async_opd in other libraries, held without a GPU.

Each test names the function that it holds to, and says so when another version has changed it.
"""

from __future__ import annotations

import ast
import importlib
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("async_opd", "rollouter", "teachers", "trainer")


@contextmanager
def contract(function: str, needs: str, by: str = "") -> Iterator[None]:
    """An error of the body becomes one that names the function, its version, and what is needed.

    ``function``: its full name, such as ``vllm.utils.torch_utils.current_stream``. ``needs``
    completes "async_opd needs that it …". ``by``: our module that relies on it, beside those that
    import it.
    """
    try:
        yield
    except Exception as error:
        package = function.partition(".")[0]
        version: Any = getattr(importlib.import_module(package), "__version__", "?")
        rely = sorted({*filter(None, [by]), *users(function)})
        raise AssertionError(
            f"{function} of {package} {version} has changed: async_opd needs that it {needs}"
            + (f", for {', '.join(rely)}" if rely else "")
            + f". Found: {type(error).__name__}: {error}"
        ) from error


def users(function: str) -> set[str]:
    """Our modules that import the function, or what it is a part of."""
    found = (files for name, files in imports().items() if f"{function}.".startswith(f"{name}."))
    return set().union(*found)


@cache
def imports() -> dict[str, set[str]]:
    """Everything that our modules import of vLLM, by its full name: the modules' paths."""
    found = defaultdict(set)
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "vllm" in text else []:
            names = [alias.name for alias in getattr(node, "names", []) if hasattr(alias, "asname")]
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            for name in names if isinstance(node, ast.Import | ast.ImportFrom) else []:
                if name.partition(".")[0] == "vllm":
                    found[name].add(str(path.relative_to(ROOT)))
    return dict(found)
