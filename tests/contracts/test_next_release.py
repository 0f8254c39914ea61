"""The names that async_opd imports are in the libraries' sources, installed and of a later release.

``ASYNC_OPD_NEXT_WHEELS`` names a folder with unpacked wheels of a later release, such as
``DIR/vllm/…``: their sources are read and never imported.
"""

from __future__ import annotations

import ast
import importlib.util
import os
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("async_opd", "rollouter", "teachers", "trainer")
LIBRARIES = ("vllm", "ray", "transformers")
"""torch takes many of its names from compiled code, which sources do not show."""
NEXT = os.environ.get("ASYNC_OPD_NEXT_WHEELS", "")


def imported(library: str) -> set[tuple[str, str]]:
    """Modules of a library and the names that our sources import from them."""
    found = set()
    for path in (file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if library in text else []:
            if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == library:
                found |= {(str(node.module), one.name) for one in node.names}
    return found


def absent(library: str, site: Path) -> Iterator[str]:
    """The names that the sources below ``site`` lack."""
    for module, name in sorted(imported(library)):
        place = site.joinpath(*module.split("."))
        files = [place.with_suffix(".py"), place / "__init__.py", place.with_suffix(".pyi")]
        texts = [file.read_text() for file in files if file.is_file()]
        is_module = (place / name).is_dir() or (place / f"{name}.py").is_file()
        is_compiled = any(place.parent.glob(f"{place.name}*.so"))
        found = is_module or is_compiled or any(defines(text, name) for text in texts)
        if not found and any("_LazyModule" in text for text in texts):
            found = name in defined_below(place)
        if not found:
            yield f"{module}: {name}"


@cache
def defined_below(package: Path) -> frozenset[str]:
    """Classes and functions of all modules of a package that loads them when they are used."""
    texts = (file.read_text() for file in package.rglob("*.py"))
    found = (re.findall(r"^(?:class|def) (\w+)", text, flags=re.MULTILINE) for text in texts)
    return frozenset(name for names in found for name in names)


def defines(text: str, name: str) -> bool:
    """Whether a module's source defines or imports a name, or lists it to be imported lazily."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names = {node.name}
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names = {(one.asname or one.name) for one in node.names} | {
                one.name for one in node.names if one.name == "*"
            }
        elif isinstance(node, ast.Assign):
            names = {part.id for part in node.targets if isinstance(part, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names = {node.target.id}
        elif isinstance(node, ast.Constant):
            names = {node.value} if isinstance(node.value, str) else set()
        else:
            continue
        if name in names:
            return True
    return False


def sites(library: str) -> list[Path]:
    """The folder of the installed library, and that of the next release if one was unpacked.

    AssertionError if the folder of unpacked wheels has none of the libraries.
    """
    unpacked = [name for name in LIBRARIES if NEXT and (Path(NEXT) / name).is_dir()]
    assert unpacked or not NEXT, f"ASYNC_OPD_NEXT_WHEELS has none of {LIBRARIES}: {NEXT}"
    spec = importlib.util.find_spec(library)
    found = [Path(spec.origin).parents[1]] if spec and spec.origin else []
    if library in unpacked:
        found.append(Path(NEXT))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("library", LIBRARIES)
def test_every_name_that_is_imported_is_in_the_librarys_sources(library: str) -> None:
    assert imported(library)
    assert sites(library)
    missing = {str(site): list(absent(library, site)) for site in sites(library)}
    assert all(not names for names in missing.values()), missing


def test_a_folder_without_unpacked_wheels_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.contracts.test_next_release.NEXT", str(tmp_path))
    with pytest.raises(AssertionError, match="has none of"):
        sites("vllm")


def test_a_name_that_a_release_no_longer_has_is_found(tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("class SamplingParams: ...\n")
    names = list(absent("vllm", tmp_path))
    assert "vllm: AsyncEngineArgs" in names
    assert "vllm: SamplingParams" not in names
