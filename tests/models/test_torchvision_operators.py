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


TRIED = "\ntry:\n    import torchvision\nexcept KeyError:\n    os.environ['NEEDED'] = '1'\n"
FINDS = "import importlib.util as u, sys; u.find_spec('torchvision')"
UNKNOWN = "import torchvision, sys; sys.exit('async_opd' in sys.modules)"
WITHOUT = "import sys; sys.modules['async_opd'] = None; import torchvision"


@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        (f"{INSTALLS}; install(); import torchvision", ()),
        (f"import os; {INSTALLS}{TRIED}import torchvision", ()),
        (f"{INSTALLS}; {FINDS}; sys.exit('torch' in sys.modules)", ()),
        (f"{INSTALLS}; {CHILD}", (UNKNOWN,)),
        (f"{INSTALLS}; {CHILD}", (WITHOUT,)),
        (f"{INSTALLS}\n{ENGINE}", ()),
    ],
    ids=[
        "where the library does not load",
        "an import that failed is tried again",
        "torch is not imported before torchvision is",
        "a child that imports nothing of async_opd",
        "a child that cannot import async_opd",
        "an engine whatever PYTHONPATH is by then",
    ],
)
def test_schemas_are_defined(torchvision: Path, script: str, arguments: tuple[str, ...]) -> None:
    if "NEEDED" in script:
        code = torchvision / "torchvision" / "__init__.py"
        code.write_text(f"import os{REGISTERS}os.environ['NEEDED']")
    # another installation may be on the path, too
    shutil.copytree(torchvision_operators.FOLDER, torchvision / "other" / "first_on_path")
    done = run(script, torchvision / "other/first_on_path", torchvision, ROOT, arguments=arguments)
    assert done.returncode == 0, done.stderr


def test_a_library_that_loads_defines_its_own_and_others_get_none(torchvision: Path) -> None:
    (torchvision / "torchvision" / "_C.so").unlink()
    (torchvision / "torchvision" / "_C.so").symlink_to(_ctypes.__file__)
    for script in (f"{INSTALLS}; import torchvision", "import torchvision"):
        done = run(script, torchvision, ROOT)
        assert "operator torchvision::nms does not exist" in done.stderr


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


def test_no_code_of_ours_runs_in_a_child_without_torchvision() -> None:
    child = "import sys; print([n for n, m in sys.modules.items() if 'opd' in str(m)])"
    assert run(f"{INSTALLS}; {CHILD}", ROOT, arguments=(child,)).stdout == "[]\n"


@pytest.mark.parametrize(("folder", "start"), [("with spaces", CHILD), ("of a:b", ENGINE)])
def test_any_installation_path_will_do(
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


def test_only_vllm_calls_an_entry_point_of_ours_in_other_programs() -> None:
    groups = {one.group for one in distribution("async-opd").entry_points}
    assert groups == {"console_scripts", "vllm.general_plugins"}
