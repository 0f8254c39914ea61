"""torchvision can be imported beside a torch that its library does not load into."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

from async_opd.models import torchvision_operators

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
INSTALLS = "from async_opd.models.torchvision_operators import install; install()"
REGISTERS = """
import torch
for name in ("nms", "qnms"):
    torch.library.register_fake(f"torchvision::{name}")(lambda dets, scores, threshold: scores)
"""
"""The effect of the import of torchvision."""
CHILD = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
ENGINE = """
import multiprocessing, os
os.environ.pop("PYTHONPATH")
engine = multiprocessing.get_context("spawn").Process(target=__import__, args=("torchvision",))
engine.start()
engine.join()
raise SystemExit(engine.exitcode)
"""
"""Starts a process as vLLM starts an engine, after the environment was replaced."""


def run(
    script: str, *path: Path, arguments: tuple[str, ...] = ()
) -> subprocess.CompletedProcess[str]:
    """Runs the script in a process that finds modules in these folders first."""
    return subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))},
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.fixture
def torchvision(tmp_path: Path) -> Path:
    """The folder of a package that imports as torchvision does, with a library of another torch."""
    package = tmp_path / "site" / "torchvision"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(REGISTERS)
    (package / "_C.so").write_bytes(b"built for another torch")
    return package.parent


def test_schemas_are_defined_where_the_library_does_not_load(torchvision: Path) -> None:
    done = run(f"{INSTALLS}; install(); import torchvision", torchvision, ROOT)
    assert done.returncode == 0, done.stderr


def test_a_library_that_loads_defines_its_own(torchvision: Path) -> None:
    (torchvision / "torchvision" / "_C.so").unlink()
    (torchvision / "torchvision" / "_C.so").symlink_to(_ctypes.__file__)
    done = run(f"{INSTALLS}; import torchvision", torchvision, ROOT)
    assert "operator torchvision::nms does not exist" in done.stderr


def test_an_import_that_failed_can_be_tried_again(torchvision: Path) -> None:
    code = torchvision / "torchvision" / "__init__.py"
    code.write_text(f"import os{REGISTERS}os.environ['NEEDED']")
    tried = "\ntry:\n    import torchvision\nexcept KeyError:\n    os.environ['NEEDED'] = '1'\n"
    done = run(f"import os; {INSTALLS}{tried}import torchvision", torchvision, ROOT)
    assert done.returncode == 0, done.stderr


def test_what_is_imported_is_torchvision_itself(torchvision: Path) -> None:
    package = torchvision / "torchvision"
    (package / "io.py").write_text("")
    printed = "t.__file__, t.__spec__.origin, *t.__path__, t.io.__file__, t.__loader__.path"
    done = run(
        f"{INSTALLS}; import torchvision.io; t = torchvision; print({printed})", torchvision, ROOT
    )
    code = str(package / "__init__.py")
    assert done.stdout.split() == [code, code, str(package), str(package / "io.py"), code]


def test_without_torchvision_nothing_stands_in_its_place() -> None:
    script = f"{INSTALLS.replace(';', '; import sys; sys.path = [];')}; import torchvision"
    done = run(script, ROOT)
    assert "No module named 'torchvision'" in done.stderr
    assert torchvision_operators.FOLDER not in done.stderr


def test_a_child_that_has_no_torchvision_of_its_own_gets_the_usual_error(torchvision: Path) -> None:
    child = "import torch, sys; sys.path = [one for one in sys.path if 'first_on' in one]"
    done = run(
        f"{INSTALLS}; {CHILD}", torchvision, ROOT, arguments=(f"{child}; import torchvision",)
    )
    assert "ModuleNotFoundError: No module named 'torchvision'" in done.stderr


def test_torch_is_not_imported_before_torchvision_is(torchvision: Path) -> None:
    script = f"{INSTALLS}; import importlib.util as u, sys; u.find_spec('torchvision')"
    done = run(f"{script}; sys.exit('torch' in sys.modules)", torchvision, ROOT)
    assert done.returncode == 0, done.stderr


def test_a_child_that_imports_nothing_of_async_opd_has_the_schemas(torchvision: Path) -> None:
    child = "import torchvision, sys; sys.exit('async_opd' in sys.modules)"
    done = run(f"{INSTALLS}; {CHILD}", torchvision, ROOT, arguments=(child,))
    assert done.returncode == 0, done.stderr


def test_a_child_that_cannot_import_async_opd_has_the_schemas(torchvision: Path) -> None:
    child = "import sys; sys.modules['async_opd'] = None; import torchvision"
    done = run(f"{INSTALLS}; {CHILD}", torchvision, ROOT, arguments=(child,))
    assert done.returncode == 0, done.stderr


def test_no_code_of_ours_runs_in_a_child_without_torchvision() -> None:
    child = "import sys; print([n for n, m in sys.modules.items() if 'opd' in str(m)])"
    assert run(f"{INSTALLS}; {CHILD}", ROOT, arguments=(child,)).stdout == "[]\n"


def test_an_engine_has_the_schemas_whatever_pythonpath_is_by_then(torchvision: Path) -> None:
    done = run(f"{INSTALLS}\n{ENGINE}", torchvision, ROOT)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("folder", "start"), [("with spaces", CHILD), ("of a:b", ENGINE)])
def test_any_path_of_the_installation_will_do(
    torchvision: Path, tmp_path: Path, folder: str, start: str
) -> None:
    own = Path(torchvision_operators.__file__)
    place = tmp_path / folder
    shutil.copytree(own.parent / "first_on_path", place / "first_on_path")
    shutil.copy(own, place)
    loads = (
        f"import sys; sys.path.append({str(place)!r}); from {own.stem} import install; install()"
    )
    done = run(f"{loads}\n{start}", torchvision, arguments=("import torchvision",))
    assert done.returncode == 0, done.stderr


def test_two_installations_may_be_on_the_path(torchvision: Path, tmp_path: Path) -> None:
    shutil.copytree(torchvision_operators.FOLDER, tmp_path / "other" / "first_on_path")
    done = run(
        f"{INSTALLS}; import torchvision", tmp_path / "other/first_on_path", torchvision, ROOT
    )
    assert done.returncode == 0, done.stderr


def test_other_programs_of_the_environment_get_no_schemas(torchvision: Path) -> None:
    done = run("import torchvision", torchvision, ROOT)
    assert "operator torchvision::nms does not exist" in done.stderr


def test_only_vllm_calls_an_entry_point_of_ours_in_other_programs() -> None:
    groups = {one.group for one in distribution("async-opd").entry_points}
    assert groups == {"console_scripts", "vllm.general_plugins"}
