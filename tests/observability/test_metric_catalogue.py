"""The catalogue has every metric once, none that no code writes, and a panel for each chart."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import get_args

import pytest

from async_opd.config import keys
from async_opd.observability import metric_catalogue
from async_opd.observability.metric_catalogue import (
    Charts,
    Metric,
    Panel,
    Part,
    Plot,
    catalogue,
    find,
    live_values,
    panels,
    plots,
    unknown,
)
from async_opd.tools.report import verdict

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


def test_the_page_of_dashboards_is_what_the_panels_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_dashboards.py"))["document"]()
    assert (ROOT / "docs" / "dashboards.md").read_text() == made, "python docs/make_dashboards.py"


def test_the_panels_show_metrics_of_the_catalogue() -> None:
    patterns = {metric.pattern for metric in catalogue()}
    keys = [key for panel in panels() for key in panel.keys]
    assert [key for key in keys if key not in patterns and find(key) is None] == []


def test_a_panel_with_patterns_matches_the_keys_of_all_names_and_no_other() -> None:
    panel = next(panel for panel in panels() if panel.title == "Replicas")
    assert re.match(panel.regex, "teacher/math/serving")
    assert re.match(panel.regex, "rollout/replicas")
    assert not re.match(panel.regex, "teacher/math/busy")
    loss = next(panel for panel in panels() if panel.title == "Loss")
    assert loss.keys == ("loss/total", "loss/distillation")


def test_a_panel_that_no_metric_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    lost = Metric("train/new", "Health", "1", "New.", chart=Charts(panel="Nowhere"))
    monkeypatch.setattr(metric_catalogue, "catalogue", lambda: (lost,))
    with pytest.raises(ValueError, match="Nowhere"):
        panels.__wrapped__()


def test_a_chart_of_the_report_takes_from_its_panel_and_metric_what_it_does_not_say() -> None:
    panel = Panel("Tokens", "Tokens of a batch.", "Many.", "Wait.")
    metric = Metric("train/<n>/new", "Health", "tokens", "New.", chart=Charts(panel, Plot("pools")))
    assert metric.plot == Plot(
        "pools", "train-n-new", "lines", "Tokens", "Tokens of a batch. Many.", y="tokens",
        lines={"<n>": ("train/<n>/new",)},
    )  # fmt: skip


@pytest.mark.parametrize("part", get_args(Part))
def test_charts_of_the_report_have_texts_and_keys_of_the_catalogue(part: Part) -> None:
    patterns = {metric.pattern for metric in catalogue()}
    for plot in plots(part):
        assert plot.note.endswith("."), plot
        assert all((plot.title, plot.y)), plot
        named = {key.removeprefix("-") for keys in plot.lines.values() for key in keys}
        assert named <= patterns


def test_curves_of_the_live_view_are_of_one_key_and_have_a_format_for_numbers() -> None:
    assert [key for key in live_values() if "<" in key] == []
    assert all(format(0.5, one.form) for one in live_values().values())


def advice() -> Iterator[tuple[str, str]]:
    """The advice of each panel, and every text of the verdicts, each with its place."""
    yield from ((panel.title, f"{panel.normal} {panel.otherwise}") for panel in panels())
    tree = ast.parse(inspect.getsource(verdict))
    texts = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    yield "verdict", " ".join(text for text in texts if isinstance(text, str))


def test_every_config_key_of_an_advice_exists() -> None:
    known = set(keys.all_keys())
    sections = {key.partition(".")[0] for key in known}
    named = re.compile(rf"\b(?:{'|'.join(sorted(sections))})\.[a-z_<>]+(?:\.[a-z_<>]+)*(?!\()")
    found = [(where, key) for where, text in advice() for key in named.findall(text)]
    assert len(found) > 20
    assert [(where, key) for where, key in found if key not in known] == []
