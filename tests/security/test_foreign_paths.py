"""Files below a foreign directory are reached by one type, and by its methods alone."""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_opd.files.foreign import ForeignPath
from tests.security.test_promises import sources

HOME = "async_opd/files/foreign.py"
PLAIN = {
    "async_opd/checkpoint/store.py: in_its_run": "the directory that was given",
    "async_opd/checkpoint/store.py: load": "a checkpoint, after every byte of it was compared",
    "async_opd/data/files.py: file_rows": "the folder of images, which are opened below it",
    "async_opd/data/hub.py: _downloaded": "the hub's cache, to which a list is added",
    "async_opd/tools/evaluated_model.py: _model_in": "a model's directory, which is checked",
    "async_opd/tools/given_run.py: given_run": "the directory that was given",
    "async_opd/tools/given_run.py: given_config": "the given directory, for relative paths",
    "async_opd/observability/wandb_sink.py: _wandb_table": "a thumbnail, which wandb reads",
    "async_opd/tools/report/command.py: _report": "the directory that was given, for report.html",
    "async_opd/tools/report/recorded_run.py: read_summary": "the given directory, to be shown",
}
"""Functions that take a plain path from the type."""
READERS = (
    *("async_opd/tools/report/", "async_opd/tools/inspecting/", "async_opd/tools/replay/"),
    *("async_opd/tools/plan/", "async_opd/tools/export.py", "async_opd/tools/evaluate.py"),
    *("async_opd/tools/evaluated_model.py", "async_opd/tools/given_run.py"),
    *("async_opd/tools/watch.py", "async_opd/observability/live/"),
    *("async_opd/microscope.py", "async_opd/pictures.py", "async_opd/checkpoint/"),
    *("async_opd/data/", "async_opd/accounting/", "async_opd/observability/loggers.py"),
    *("async_opd/observability/logged_run.py", "trainer/replay/"),
)
"""Where directories are read that somebody else may have filled."""
OTHERS = {
    "async_opd/checkpoint/earlier_run.py: _replace": "files that this process has downloaded",
    "async_opd/checkpoint/store.py: _refuse_other_files": "a checkpoint that is being written",
    "async_opd/data/arrow_rows.py: _batches": "the name of a file that is held open",
    "async_opd/observability/live/live_file.py: started_at": "/proc",
    "async_opd/microscope.py: from_bytes": "bytes in memory",
    "async_opd/tools/report/page.py: page": "the package's own scripts",
}
"""Functions there that open other files by a plain path."""
MOST = 20
CALLS = {
    *("open", "os.open", "os.walk", "os.fwalk", "os.scandir", "os.listdir", "safe_open", "np.load"),
    *("shutil.copy", "shutil.copy2", "shutil.copyfile", "shutil.copytree", "shutil.move"),
    "pyarrow.memory_map",
}
METHODS = {"read_text", "read_bytes", "glob", "rglob", "iterdir", "readlink"}
Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(*words: str, below: tuple[str, ...] = ("",)) -> Iterator[tuple[str, Function]]:
    """Every function of such files with such words, those within functions left out."""
    for file, tree in sources(*words, below=below):
        for node in tree.body:
            for one in node.body if isinstance(node, ast.ClassDef) else [node]:
                if isinstance(one, Function) and file != HOME:
                    yield file, one


def takes_a_plain_path(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    return node.attr in ("as_path", "root") and ast.unparse(node) != "logging.root"


def opens_by_a_plain_path(node: ast.AST) -> bool:
    """Whether a call opens, lists or copies files, but with the opener of a run's own files."""
    if not isinstance(node, ast.Call) or "opener=regular_file" in ast.unparse(node):
        return False
    method = node.func.attr if isinstance(node.func, ast.Attribute) else ""
    return method in METHODS or ast.unparse(node.func) in CALLS


def test_few_functions_take_a_plain_path_and_each_has_a_reason() -> None:
    found = {
        f"{file}: {one.name}"
        for file, one in functions("as_path", ".root")
        if any(map(takes_a_plain_path, ast.walk(one)))
    }
    assert found == PLAIN.keys()
    assert len(PLAIN) + len(OTHERS) <= MOST


def test_readers_open_files_by_the_type_alone() -> None:
    words = (*METHODS, *(name.rpartition(".")[2] for name in CALLS))
    found = {
        f"{file}: {one.name}"
        for file, one in functions(*words, below=READERS)
        if any(map(opens_by_a_plain_path, ast.walk(one)))
    }
    assert found == OTHERS.keys()


def test_a_place_that_was_given_is_only_passed_on() -> None:
    """A plain path would be joined and opened with the links below it."""
    wrong = []
    for file, one in functions("Place"):
        arguments = (*one.args.args, *one.args.kwonlyargs)
        places = {a.arg for a in arguments if a.annotation and ast.unparse(a.annotation) == "Place"}
        for node in ast.walk(one):
            inner = getattr(node, "left", None) or getattr(node, "value", None)
            used = isinstance(node, ast.BinOp | ast.Attribute) and isinstance(inner, ast.Name)
            if used and inner.id in places:
                wrong.append(f"{file}: {one.name}: {ast.unparse(node)}")
    assert wrong == []


def test_the_type_is_no_path(tmp_path: Path) -> None:
    place = ForeignPath(tmp_path)
    assert not isinstance(place, os.PathLike | str | bytes)
    for use in (open, os.listdir, Path):
        with pytest.raises(TypeError):
            use(place)  # type: ignore[operator]
