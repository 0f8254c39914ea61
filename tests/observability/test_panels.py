"""Every panel is documented, and shows metrics of the catalogue."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_opd.config import keys
from async_opd.observability.metric_catalogue import catalogue, find
from async_opd.observability.panels import Panel, panels
from async_opd.tools.report import verdict

ROOT = Path(__file__).parents[2]
SECTIONS = ["Learning", "Staleness", "Throughput", "Teachers", "Weight sync", "Health"]


def test_the_page_of_dashboards_is_what_the_panels_say() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_dashboards.py"))["document"]()
    assert (ROOT / "docs" / "dashboards.md").read_text() == made, "python docs/make_dashboards.py"


def test_the_sections_are_those_that_people_are_told() -> None:
    assert list(dict.fromkeys(panel.section for panel in panels())) == SECTIONS


@pytest.mark.parametrize("panel", panels(), ids=lambda panel: panel.title)
def test_a_panel_shows_metrics_of_the_catalogue_and_says_what_to_do(panel: Panel) -> None:
    patterns = {metric.pattern for metric in catalogue()}
    unknown = [key for key in panel.keys if key not in patterns and find(key) is None]
    assert unknown == []
    assert all(text.endswith(".") for text in (panel.shows, panel.normal, panel.otherwise))


def test_a_panel_with_patterns_matches_the_keys_of_all_names_and_no_other() -> None:
    panel = next(panel for panel in panels() if panel.title == "Replicas")
    assert re.match(panel.regex, "teacher/math/serving")
    assert re.match(panel.regex, "rollout/replicas")
    assert not re.match(panel.regex, "teacher/math/busy")


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
