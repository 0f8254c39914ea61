"""Python runs this when a child of async_opd's processes starts: engines, vLLM's helpers, graders.

Only ``torchvision_operators.install`` puts this folder on a process's path. A ``sitecustomize`` of
the user's own, which this file hides, runs first.
"""

import sys
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from pathlib import Path

_here = Path(__file__).parent
_own = PathFinder.find_spec("sitecustomize", [one for one in sys.path if Path(one) != _here])
if _own is not None and _own.loader is not None:
    _own.loader.exec_module(module_from_spec(_own))
if find_spec("async_opd") is not None:  # a grader may start another Python
    from async_opd.models.torchvision_operators import install

    install()
