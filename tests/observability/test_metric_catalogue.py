"""The catalogue has every metric once, and no metric that no code writes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from async_opd.observability.metric_catalogue import catalogue, find, unknown

ROOT = Path(__file__).parents[2]
READERS = ("tools/", "checks/", "observability/live/")
"""Modules that only read metrics: that they name one does not show that it is written."""


@cache
def written() -> frozenset[str]:
    """String constants and field names of the code that may write metrics.

    What an f-string inserts is ``<>``.
    """
    found: set[str] = set()
    for package in ("async_opd", "rollouter", "teachers", "trainer"):
        for file in (ROOT / package).rglob("*.py"):
            if not any(reader in str(file.relative_to(ROOT)) for reader in READERS):
                found |= set(_texts(ast.parse(file.read_text())))
    return frozenset(found)


def _texts(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id
        elif isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else "<>" for p in node.values)
            yield "".join(map(str, parts))


def is_written(pattern: str) -> bool:
    """Whether the code has the whole pattern, or its last part, of which it makes keys."""
    whole = re.sub(r"<\w+>", "<>", pattern)
    last = whole.rpartition("/")[2].removesuffix("_per_s")
    return any(text == whole or (text == last != "<>") or _makes(text, whole) for text in written())


def _makes(text: str, whole: str) -> bool:
    """Whether an f-string that ends with a literal name makes keys of the pattern."""
    if "<>/" not in text or "<>" in text.rpartition("/")[2]:
        return False
    return re.fullmatch(".+".join(map(re.escape, text.split("<>"))), whole) is not None


def test_the_code_writes_every_metric() -> None:
    assert [one.pattern for one in catalogue() if not is_written(one.pattern)] == []


def test_every_metric_has_a_unit_and_a_meaning() -> None:
    assert [m.pattern for m in catalogue() if not m.unit or not m.meaning.endswith(".")] == []


@pytest.mark.parametrize(
    ("key", "pattern"),
    [
        ("loss/total", "loss/total"),
        ("teacher/math/busy", "teacher/<name>/busy"),
        ("queue/rollouts/math/ready", "queue/<topic>/ready"),
        ("eval/openai/gsm8k/accuracy", "<evaluation>/<source>/accuracy"),
        ("sync/student/0/stall_s", "sync/student/<replica>/stall_s"),
    ],
)
def test_a_key_is_found_by_its_pattern(key: str, pattern: str) -> None:
    metric = find(key)
    assert metric is not None
    assert metric.pattern == pattern


def test_keys_that_no_pattern_has_are_named() -> None:
    assert unknown({"step", "time", "loss/total", "loss/of_nothing"}) == ["loss/of_nothing"]
