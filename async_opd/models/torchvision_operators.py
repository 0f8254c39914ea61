"""torchvision can be imported in async_opd's processes, also beside a torch of another build.

driver, ranks, replicas, graders ──► install ──► sys.path, PYTHONPATH ──► engines and other children
                                                     └─ first_on_path/torchvision

vLLM's engines import torchvision before any code of ours: the module that defines its operators has
to be on their path when they start. Other programs of the environment are left alone.
"""

from __future__ import annotations

import os
import sys
from importlib.machinery import PathFinder
from pathlib import Path

FOLDER = str(Path(__file__).parent / "first_on_path")
"""Its ``torchvision`` defines the operators where torchvision's library cannot load."""


def install() -> None:
    """Puts ``FOLDER`` first on the path of this process, and of each child that it starts.

    Nothing is imported. Call it before transformers or vLLM is imported. ``PYTHONPATH`` cannot name
    a folder with a colon in its path: children of multiprocessing, such as engines, have it still.
    """
    if PathFinder.find_spec("torchvision") is None:
        return
    if FOLDER not in sys.path:
        sys.path.insert(0, FOLDER)
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if FOLDER not in paths and os.pathsep not in FOLDER:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [FOLDER, *paths]))


def define() -> None:
    """Does nothing. torch calls it where this package was installed before it had ``install``."""
