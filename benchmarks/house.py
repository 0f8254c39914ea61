"""How large the library is, and how it hangs together.

    python -m benchmarks.house [--root DIR] [--walks]

    statements            lines without imports, docstrings, comments and blank lines
    statements_of_a_run   of these, those outside async_opd/tools
    docstrings            lines of docstrings for 100 such lines
    modules               files
    circles               groups of files, or of rooms, that import one another, types included
    most_imports          modules of ours that one file imports, at most
    longest_function      lines, at most
    typed                 share of the functions with all types
    test_lines            lines below tests/
    config_rows           rows in docs/config.md
    frames, hops          with ``--walks``: see benchmarks.walks, which starts two runs

Prints one JSON line last. Exit code 0: the limits are those of tests/test_rooms.py.
"""

from __future__ import annotations

import argparse
import ast
import json
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import networkx

from benchmarks.walks import counts

PACKAGES = ("async_opd", "rollouter", "teachers", "trainer")
Function = ast.FunctionDef | ast.AsyncFunctionDef


def measured(root: Path) -> dict[str, Any]:
    """All figures of a source tree."""
    files = {path: ast.parse(path.read_text()) for name in PACKAGES for path in _below(root / name)}
    kinds = {path: _kinds(path, tree) for path, tree in files.items()}
    total: Counter[str] = sum(kinds.values(), Counter())
    tools = root / "async_opd" / "tools"
    run = sum(kinds[path]["statement"] for path in files if not path.is_relative_to(tools))
    modules = {_name(root, path): tree for path, tree in files.items()}
    imports = {name: set(_imported(name, tree, modules)) for name, tree in modules.items()}
    functions = [
        node for tree in files.values() for node in ast.walk(tree) if isinstance(node, Function)
    ]
    return {
        "statements": total["statement"],
        "statements_of_a_run": run,
        "docstrings": round(100 * total["docstring"] / total["statement"], 1),
        "modules": len(files),
        "circles": len(_circles(imports)) + len(_circles(_of_rooms(imports))),
        "most_imports": max(map(len, imports.values())),
        "longest_function": max((one.end_lineno or 0) - one.lineno + 1 for one in functions),
        "typed": round(sum(map(_typed, functions)) / len(functions), 4),
        "test_lines": sum(len(path.read_text().splitlines()) for path in _below(root / "tests")),
        "config_rows": (root / "docs" / "config.md").read_text().count("\n| `"),
    }


def _below(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def _name(root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _kinds(path: Path, tree: ast.AST) -> Counter[str]:
    """The lines of a file by kind: import, docstring, comment, blank or statement."""
    lines = path.read_text().splitlines()
    bare = [one.strip()[:1] for one in lines]
    kinds = [{"": "blank", "#": "comment"}.get(first, "statement") for first in bare]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kind = "import"
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            kind = "docstring" if isinstance(node.value.value, str) else "statement"
        else:
            continue
        for number in range(node.lineno - 1, node.end_lineno or node.lineno):
            kinds[number] = kind
    return Counter(kinds)


def _imported(name: str, tree: ast.AST, modules: dict[str, ast.Module]) -> Iterator[str]:
    """The modules of ours that a file imports, also inside functions and for types only."""
    for node in ast.walk(tree):
        found: list[str] = []
        if isinstance(node, ast.Import):
            found = [one.name for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{one.name}" for one in node.names]
            found = [one if one in modules else str(node.module) for one in names]
        yield from (one for one in found if one in modules and one != name)


def _of_rooms(imports: dict[str, set[str]]) -> dict[str, set[str]]:
    """The imports between rooms: ``async_opd.queue``, ``trainer`` with all folders in it."""
    rooms: dict[str, set[str]] = {}
    for name, found in imports.items():
        rooms.setdefault(_room(name), set()).update(map(_room, found))
    return rooms


def _room(name: str) -> str:
    return ".".join(name.split(".")[: 2 if name.startswith("async_opd.") else 1])


def _circles(imports: dict[str, set[str]]) -> list[set[str]]:
    graph = networkx.DiGraph((a, b) for a, found in imports.items() for b in found if a != b)
    return [one for one in networkx.strongly_connected_components(graph) if len(one) > 1]


def _typed(function: Function) -> bool:
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    named = [one for one in every if one is not None and one.arg not in ("self", "cls")]
    return function.returns is not None and all(one.annotation for one in named)


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1])
    parser.add_argument("--walks", action="store_true")
    given = parser.parse_args()
    walks = counts(Path(tempfile.mkdtemp(prefix="walks"))) if given.walks else {}
    print(json.dumps(measured(given.root) | walks))


if __name__ == "__main__":
    main()
