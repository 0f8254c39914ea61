"""YAML of other frameworks: parents that ``defaults`` names, and ``${…}`` references.

References are absolute (``${policy.precision}``), relative (``${.lr}``, ``${..model}``) or
``${mul:${a}, ${b}}``. Any other resolver stays as the text it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_opd.config.yaml_text import YamlError, load_yaml
from async_opd.files.foreign import foreign
from async_opd.tools.importing.budget import FILE_BYTES, Budget
from async_opd.tools.importing.draft import flat

REFERENCE = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")
PRODUCT = re.compile(r"\$\{mul:\s*([\d.]+)\s*,\s*([\d.]+)\s*\}")
MAX_PARENTS = 8


def read_yaml(path: Path, budget: Budget) -> tuple[dict[str, Any], list[str], list[str]]:
    """The leaves by dotted key, the parents, and those that are missing. OSError.

    YamlError for a value that refers to itself; SyntaxError if they are more than the budget.
    """
    parents, missing = list[str](), list[str]()
    tree = _with_parents(path, parents, missing)
    references = _References(flat(tree, budget), budget)
    leaves = {key: references.resolved(key, ()) for key in references.leaves}
    return leaves, parents, missing


def _with_parents(path: Path, parents: list[str], missing: list[str]) -> dict[str, Any]:
    """The tree of a file over those of its parents, whose names are added to the lists."""
    tree = load_yaml(foreign(path).read(FILE_BYTES).decode())
    if not isinstance(tree, dict):
        return {}
    parent = tree.get("defaults")
    if not isinstance(parent, str) or len(parents) >= MAX_PARENTS:
        return tree
    del tree["defaults"]
    file = path.parent / parent
    if not file.is_file():
        missing.append(parent)
        return tree
    parents.append(parent)
    merged: dict[str, Any] = _merged(_with_parents(file, parents, missing), tree)
    return merged


def _merged(above: Any, tree: Any) -> Any:
    if not (isinstance(above, dict) and isinstance(tree, dict)):
        return tree
    both = {name: _merged(above[name], tree[name]) for name in above.keys() & tree.keys()}
    return {**above, **tree, **both}


@dataclass
class _References:
    """``known`` are the values of keys that were resolved before."""

    leaves: dict[str, Any]
    budget: Budget
    known: dict[str, Any] = field(default_factory=dict)

    def resolved(self, key: str, above: tuple[str, ...]) -> Any:
        """The value of a key that the keys ``above`` refer to."""
        if key in above:
            raise YamlError([(1, key, f"{key} refers to itself: {' → '.join((*above, key))}")])
        if key not in self.known:
            value = self.leaves[key]
            found = isinstance(value, str) and "${" in value
            self.known[key] = self._filled(key, value, (*above, key)) if found else value
        return self.known[key]

    def _filled(self, key: str, value: str, above: tuple[str, ...]) -> Any:
        """The value with its references in place; one to no key stays as it is."""

        def target(found: re.Match[str]) -> Any:
            name = _target(key, found[1], found[2])
            value = self.resolved(name, above) if name in self.leaves else found[0]
            self.budget.take(len(name) + len(str(value)), key)
            return value

        if whole := REFERENCE.fullmatch(value):
            return target(whole)
        value = REFERENCE.sub(lambda found: str(target(found)), value)
        value = PRODUCT.sub(lambda found: f"{float(found[1]) * float(found[2]):g}", value)
        return float(value) if re.fullmatch(r"\d+(\.\d+)?(e\+\d+)?", value) else value


def _target(key: str, dots: str, name: str) -> str:
    """The dotted key of a reference: one dot means the section itself, each further one above."""
    above = key.split(".")[: -len(dots)] if dots else []
    return ".".join([*above, name])
