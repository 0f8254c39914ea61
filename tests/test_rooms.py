"""The packages are the rooms that docs/architecture.md draws, and their names have one meaning."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import grimp
import networkx

ROOT = Path(__file__).parent.parent
PACKAGES = ("async_opd", "rollouter", "teachers", "trainer")
MAX_MODULES = 16


def room(module: str) -> str:
    """``queue`` of ``async_opd.queue.topic``, ``trainer`` of ``trainer.losses.kl``."""
    parts = module.split(".")
    return ".".join(parts[1:2]) if parts[0] == "async_opd" else parts[0]


@cache
def files() -> frozenset[tuple[str, str]]:
    """Which module imports which, also inside functions and for types only."""
    graph = grimp.build_graph(*PACKAGES)
    found = ((one, graph.find_modules_directly_imported_by(one)) for one in graph.modules)
    return frozenset((one, imported) for one, direct in found for imported in direct)


@cache
def imports() -> frozenset[tuple[str, str]]:
    """Which room imports which."""
    edges = {(room(module), room(imported)) for module, imported in files()}
    return frozenset((a, b) for a, b in edges if a and b and a != b)


@cache
def reached(start: str) -> frozenset[str]:
    """All rooms that a room imports, itself or through others."""
    direct = {b for a, b in imports() if a == start}
    return frozenset(direct.union(*(reached(b) for b in direct)))


def shortest_picture() -> set[tuple[str, str]]:
    """The imports without those that a chain of others implies (transitive reduction)."""
    return {
        (a, b)
        for a, b in imports()
        if not any(b in reached(via) for x, via in imports() if x == a and via != b)
    }


def drawn() -> set[tuple[str, str]]:
    """The arrows of the diagram in docs/architecture.md; ``a --> b & c`` are two."""
    text = (ROOT / "docs" / "architecture.md").read_text()
    (diagram,) = re.findall(r"```mermaid\n(.*?)```", text, flags=re.DOTALL)
    arrows = re.findall(r"^ *(\w+) --> ([\w& ]+)$", diagram, flags=re.MULTILINE)
    return {(a, b) for a, targets in arrows for b in targets.split(" & ")}


def folders() -> Iterator[Path]:
    """All package folders of the library."""
    for package in PACKAGES:
        yield ROOT / package
        yield from (init.parent for init in (ROOT / package).glob("**/*/__init__.py"))


def test_the_picture_of_the_rooms_has_every_arrow_that_the_imports_have_and_no_other() -> None:
    assert drawn() == shortest_picture()


def test_every_room_has_a_docstring() -> None:
    inits = {str(f): ast.parse((f / "__init__.py").read_text()) for f in folders()}
    assert [name for name, tree in inits.items() if not ast.get_docstring(tree)] == []


def test_no_files_and_no_rooms_import_one_another_also_not_for_types() -> None:
    for edges in (files(), imports()):
        groups = networkx.strongly_connected_components(networkx.DiGraph(edges))
        assert [group for group in groups if len(group) > 1] == []


def test_every_room_has_a_place_among_the_layers() -> None:
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = next(c["layers"] for c in contracts["contracts"] if c["type"] == "layers")
    placed = {name.strip() for layer in layers for name in layer.split("|")}
    there = [p for p in (ROOT / "async_opd").glob("*") if p.is_dir() or p.suffix == ".py"]
    names = {f"async_opd.{p.stem}" for p in there if not p.name.startswith("__")}
    assert names - placed == set()


def test_no_room_has_more_modules_than_one_can_look_over() -> None:
    modules = {str(f.relative_to(ROOT)): len(list(f.glob("*.py"))) - 1 for f in folders()}
    assert {name: count for name, count in modules.items() if count > MAX_MODULES} == {}


def test_every_room_that_contributing_adds_a_module_to_has_space_for_it() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"one module in `([\w/]+)/`", text)
    assert len(named) > 3
    counts = {name: len(list((ROOT / name).glob("*.py"))) for name in named}  # __init__ is the one
    assert {name: count for name, count in counts.items() if count > MAX_MODULES} == {}


def test_no_public_class_name_is_given_three_times() -> None:
    places = defaultdict(list)
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for name in re.findall(r"^class ([^_\W]\w*)", path.read_text(), flags=re.MULTILINE):
                places[name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 2} == {}
