"""Every panel is documented; the charts of the report and the live view are those of the table."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
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
)
from async_opd.tools.report import verdict

ROOT = Path(__file__).parents[2]


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
    """What each panel tells to do, and every text of the verdicts, with where it stands."""
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
