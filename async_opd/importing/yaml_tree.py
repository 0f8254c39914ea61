"""YAML of other frameworks: parents that ``defaults`` names, and ``${…}`` references.

References are absolute (``${policy.precision}``), relative (``${.lr}``, ``${..model}``) or
``${mul:${a}, ${b}}``. Any other resolver stays as the text it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from async_opd.config.yaml_text import load_yaml
from async_opd.files.safe_open import read_text
from async_opd.importing.draft import flat

REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
PRODUCT = re.compile(r"\$\{mul:\s*([\d.]+)\s*,\s*([\d.]+)\s*\}")
MAX_PASSES = 8
"""Bound of references to values that are references."""
MAX_PARENTS = 8


def read_yaml(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The leaves by dotted key, and the parents that are missing. YamlError, OSError."""
    tree, missing = _with_parents(path, 0)
    leaves = flat(tree)
    for _ in range(MAX_PASSES):
        leaves = {key: _resolved(key, value, leaves) for key, value in leaves.items()}
    return leaves, missing


def _with_parents(path: Path, depth: int) -> tuple[dict[str, Any], list[str]]:
    tree = load_yaml(read_text(path))
    if not isinstance(tree, dict):
        return {}, []
    parent = tree.get("defaults")
    if not isinstance(parent, str) or depth >= MAX_PARENTS:
        return tree, []
    del tree["defaults"]
    file = path.parent / parent
    if not file.is_file():
        return tree, [parent]
    above, missing = _with_parents(file, depth + 1)
    return _merged(above, tree), missing


def _merged(above: Any, tree: Any) -> Any:
    if not (isinstance(above, dict) and isinstance(tree, dict)):
        return tree
    both = {name: _merged(above[name], tree[name]) for name in above.keys() & tree.keys()}
    return {**above, **tree, **both}


def _resolved(key: str, value: Any, leaves: dict[str, Any]) -> Any:
    if not isinstance(value, str) or "${" not in value:
        return value

    def replaced(found: re.Match[str]) -> str:
        target = _target(key, found[1], found[2])
        return str(leaves[target]) if target in leaves else found[0]

    whole = REFERENCE.fullmatch(value)
    if whole:
        return leaves.get(_target(key, whole[1], whole[2]), value)
    value = REFERENCE.sub(replaced, value)
    value = PRODUCT.sub(lambda found: f"{float(found[1]) * float(found[2]):g}", value)
    return float(value) if re.fullmatch(r"\d+(\.\d+)?(e\+\d+)?", value) else value


def _target(key: str, dots: str, name: str) -> str:
    """The dotted key of a reference: one dot means the section itself, each further one above."""
    above = key.split(".")[: -len(dots)] if dots else []
    return ".".join([*above, name])
