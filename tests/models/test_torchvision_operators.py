"""torchvision can be imported beside a torch that its library does not load into."""

from __future__ import annotations

import _ctypes
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_opd.models import torchvision_operators

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
DEFINES = "import torch; from async_opd.models.torchvision_operators import define; define()"
REGISTERS = """
import torch
for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda dets, scores, threshold: scores)
"""
"""What the import of torchvision does."""


def run(folder: Path, script: str) -> subprocess.CompletedProcess[str]:
    """Runs the script in a process that finds the torchvision of ``folder`` first."""
    path = os.pathsep.join([str(folder), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def torchvision(tmp_path: Path) -> Path:
    """A package that imports as torchvision does; its library is still missing."""
    package = tmp_path / "torchvision"
    package.mkdir()
    (package / "__init__.py").write_text(REGISTERS)
    return package


def test_schemas_are_defined_where_the_library_does_not_load(torchvision: Path) -> None:
    (torchvision / "_C.so").write_bytes(b"built for another torch")
    done = run(torchvision.parent, f"{DEFINES}; define(); import torchvision")
    assert done.returncode == 0, done.stderr


def test_a_library_that_loads_defines_its_own(torchvision: Path) -> None:
    (torchvision / "_C.so").symlink_to(_ctypes.__file__)
    done = run(torchvision.parent, f"{DEFINES}; import torchvision")
    assert "operator torchvision::nms does not exist" in done.stderr


def test_without_torchvision_nothing_is_defined(monkeypatch: pytest.MonkeyPatch) -> None:
    defined: list[Any] = []
    monkeypatch.setattr(torchvision_operators, "_defined", defined)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    torchvision_operators.define()
    assert defined == []
