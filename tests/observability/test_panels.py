"""Every panel is documented, and shows metrics of the catalogue."""

from __future__ import annotations

import ast
import inspect
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

from async_opd.config import keys
from async_opd.observability.metric_catalogue import catalogue, find
from async_opd.observability.panels import panels
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
