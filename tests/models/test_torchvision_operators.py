"""torchvision can be imported beside a torch that its library does not load into."""

from __future__ import annotations

import _ctypes
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INSTALLS = "from async_opd.models.torchvision_operators import install; install()"
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
    done = run(torchvision.parent, f"{INSTALLS}; install(); import torchvision")
    assert done.returncode == 0, done.stderr


def test_a_library_that_loads_defines_its_own(torchvision: Path) -> None:
    (torchvision / "_C.so").symlink_to(_ctypes.__file__)
    done = run(torchvision.parent, f"{INSTALLS}; import torchvision")
    assert "operator torchvision::nms does not exist" in done.stderr


def test_without_torchvision_its_import_says_that_it_is_not_there(tmp_path: Path) -> None:
    done = run(tmp_path, f"{INSTALLS}; import sys; sys.path = ['']; import torchvision")
    assert "No module named 'torchvision'" in done.stderr


def test_torch_is_not_imported_before_torchvision_is(torchvision: Path) -> None:
    script = f"{INSTALLS}; import importlib.util as u, sys; u.find_spec('torchvision')"
    done = run(torchvision.parent, f"{script}; sys.exit('torch' in sys.modules)")
    assert done.returncode == 0, done.stderr


CHILD = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"


def test_a_child_that_imports_nothing_of_async_opd_has_the_schemas(torchvision: Path) -> None:
    (torchvision / "_C.so").write_bytes(b"built for another torch")
    script = f"{INSTALLS}; {CHILD}".replace("sys.argv[1]", "'import torchvision'")
    done = run(torchvision.parent, script)
    assert done.returncode == 0, done.stderr


def test_a_child_runs_the_users_own_sitecustomize_too(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("print('of the user')")
    done = run(tmp_path, f"{INSTALLS}; {CHILD}".replace("sys.argv[1]", "'print(2)'"))
    assert done.stdout.split("\n") == ["of the user", "of the user", "2", ""]


def test_other_programs_of_the_environment_get_no_schemas(torchvision: Path) -> None:
    (torchvision / "_C.so").write_bytes(b"built for another torch")
    done = run(torchvision.parent, "import torchvision")
    assert "operator torchvision::nms does not exist" in done.stderr


def test_only_vllm_calls_an_entry_point_of_ours_in_other_programs() -> None:
    groups = {one.group for one in distribution("async-opd").entry_points}
    assert groups == {"console_scripts", "vllm.general_plugins"}
