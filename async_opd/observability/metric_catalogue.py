"""Every metric that a run can write: unit, meaning, section, charts, and what others call the same.

    metrics.yaml ──► catalogue() ──► docs/metrics.md
                          ├─ find(key) ──► Metric
                          ├─ panels() ──► the dashboard and docs/dashboards.md
                          ├─ plots(part) ──► the report; Metric.chart.compare ──► compare
                          └─ live_values() ──► the live view

``tests/observability/test_metric_catalogue.py`` refuses patterns that no code writes; runs of the
tests refuse keys that are not there.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field, replace
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from typing import Literal, get_args

import yaml
from pydantic import ConfigDict, TypeAdapter

Section = Literal[
    "Learning", "Staleness", "Throughput", "Teachers", "Weight sync", "Health", "Evaluation"
]
SECTIONS: tuple[Section, ...] = get_args(Section)
Part = Literal["learning", "staleness", "pools"]
Axis = Literal["step", "time"]
Kind = Literal["lines", "accuracies", "several_answers", "lags"]
STEP = "step"
EVALUATION_STEP = "evaluation/step"
VERSION = "sync/version"
_VARIABLE = re.compile(r"<\w+>")
_FORBID = ConfigDict(extra="forbid")
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml's loader takes 17 ms for the table, which every run reads; PyYAML's takes 150 ms."""


@dataclass(frozen=True)
class Panel:
    """A panel of the dashboard: ``keys`` are metrics, or their patterns, over the axis ``x``."""

    __pydantic_config__ = _FORBID

    title: str
    shows: str
    normal: str
    otherwise: str
    section: Section | Literal[""] = ""
    x: str = STEP
    keys: tuple[str, ...] = ()

    @property
    def regex(self) -> str:
        """A regular expression of all its keys; '' if none is a pattern."""
        if not any("<" in key for key in self.keys):
            return ""
        parts = (".+".join(map(re.escape, _VARIABLE.split(key))) for key in self.keys)
        return f"^({'|'.join(parts)})$"


@dataclass(frozen=True)
class Plot:
    """A chart of the report. ``key`` is unique in its page; ``y`` names the axis of values.

    ``x`` is the other axis: the step, or the time of the run.

    ``lines`` are keys by label. Of several keys for a line the first one with values is drawn,
    times -1 with a minus before it. A key with ``<name>`` gives a line for each name.
    """

    __pydantic_config__ = _FORBID

    part: Part
    key: str = ""
    kind: Kind = "lines"
    title: str = ""
    note: str = ""
    x: Axis = "step"
    y: str = ""
    form: str = ",.5~g"
    lines: dict[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Overlay:
    """A chart of the page that compares runs, with a line for each of them."""

    __pydantic_config__ = _FORBID

    part: Literal["learning", "speed"]
    title: str
    x: Axis = "step"


@dataclass(frozen=True)
class LiveValue:
    """A curve of the live view, and the format of its newest value."""

    __pydantic_config__ = _FORBID

    name: str
    form: str = ".4g"


@dataclass(frozen=True)
class Charts:
    """Where a metric is drawn. ``panel`` is its own one, or the title of another metric's."""

    __pydantic_config__ = _FORBID

    panel: Panel | str | None = None
    report: Plot | None = None
    compare: Overlay | None = None
    live: LiveValue | None = None


@dataclass(frozen=True)
class Metric:
    """A key, or a pattern of keys: ``<name>`` stands for any text, also with a slash.

    ``meaning`` says sign and denominator. ``verl``, ``trl`` and ``miles`` are the keys under which
    these report the same quantity, '' where they have none; their denominators may differ.
    """

    __pydantic_config__ = _FORBID

    pattern: str
    section: Section
    unit: str
    meaning: str
    verl: str = ""
    trl: str = ""
    miles: str = ""
    chart: Charts = Charts()

    def matches(self, key: str) -> bool:
        """Whether the key is one of the pattern's."""
        return self.expression.fullmatch(key) is not None

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """The pattern, with a group for each variable."""
        return expression(self.pattern)

    @property
    def literal(self) -> int:
        """Characters outside of ``<…>``: of two patterns for a key the longer one is meant."""
        return len(_VARIABLE.sub("", self.pattern))

    @property
    def plot(self) -> Plot | None:
        """Its chart in the report, with all that its panel and itself say."""
        own, panel = self.chart.report, self.chart.panel
        if own is None:
            return None
        if isinstance(panel, Panel):
            note = own.note or f"{panel.shows} {panel.normal}"
            own = replace(own, title=own.title or panel.title, note=note)
        key = own.key or re.sub(r"\W+", "-", self.pattern).strip("-")
        name = re.search(r"<\w+>", self.pattern)
        label = name[0] if name else self.pattern.rpartition("/")[2].replace("_", " ")
        lines = own.lines or {label: (self.pattern,)}
        return replace(own, key=key, y=own.y or self.unit, lines=lines)


def expression(pattern: str) -> re.Pattern[str]:
    """Matches the keys of a pattern, with a group for each variable."""
    return re.compile("(.+)".join(map(re.escape, _VARIABLE.split(pattern))))


@cache
def catalogue() -> tuple[Metric, ...]:
    """All metrics, section by section. ValidationError for an entry that is none."""
    text = files(__package__).joinpath("metrics.yaml").read_text(encoding="utf-8")
    entries = [
        {"pattern": pattern, "section": section, **entry}
        for section, metrics in yaml.load(text, _LOADER).items()
        for pattern, entry in metrics.items()
    ]
    return tuple(TypeAdapter(list[Metric]).validate_python(entries))


@cache
def panels() -> tuple[Panel, ...]:
    """The panels of the dashboard, section by section.

    ValueError where a metric is drawn in a panel that no metric has.
    """
    found: dict[str, Panel] = {}
    drawn = defaultdict[str, list[str]](list)
    for metric in catalogue():
        panel = metric.chart.panel
        if isinstance(panel, Panel):
            found[panel.title] = replace(panel, section=panel.section or metric.section)
        if panel is not None:
            drawn[panel if isinstance(panel, str) else panel.title].append(metric.pattern)
    if lost := drawn.keys() - found.keys():
        raise ValueError(f"metrics.yaml: no metric has the panels {lost} → define each once")
    return tuple(
        replace(panel, keys=panel.keys or tuple(drawn[panel.title]))
        for section in SECTIONS
        for panel in found.values()
        if panel.section == section
    )


def plots(part: Part) -> tuple[Plot, ...]:
    """The charts of a part of the report's page."""
    return tuple(
        plot for metric in catalogue() if (plot := metric.plot) is not None and plot.part == part
    )


@cache
def live_values() -> dict[str, LiveValue]:
    """The curves of the live view by key."""
    return {one.pattern: one.chart.live for one in catalogue() if one.chart.live is not None}


@lru_cache(maxsize=4096)
def find(key: str) -> Metric | None:
    """The metric of a key: of all patterns that match, the one with the most literal text."""
    found = [metric for metric in catalogue() if metric.matches(key)]
    return max(found, key=lambda metric: metric.literal, default=None)


def unknown(keys: set[str]) -> list[str]:
    """The keys of a line of ``metrics.jsonl`` that are not metrics of the catalogue, sorted."""
    return sorted(key for key in keys - {"step", "time"} if find(key) is None)
