"""Every metric that a run can write: unit, meaning, section, and what others call the same.

    metrics.yaml ──► catalogue() ──► docs/metrics.md, dashboards, the report
                          └─ find(key) ──► Metric

``tests/observability/test_metric_catalogue.py`` refuses patterns that no code writes; runs of the
tests refuse keys that are not there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from importlib.resources import files
from typing import Literal, get_args

import yaml
from pydantic import ConfigDict, TypeAdapter

Section = Literal[
    "Learning", "Staleness", "Throughput", "Teachers", "Weight sync", "Health", "Evaluation"
]
SECTIONS: tuple[Section, ...] = get_args(Section)
_VARIABLE = re.compile(r"<\w+>")


@dataclass(frozen=True)
class Metric:
    """A key, or a pattern of keys: ``<name>`` stands for any text, also with a slash.

    ``meaning`` says sign and denominator. ``verl``, ``trl`` and ``miles`` are the keys under which
    these report the same quantity, '' where they have none; their denominators may differ.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    pattern: str
    section: Section
    unit: str
    meaning: str
    verl: str = ""
    trl: str = ""
    miles: str = ""

    def matches(self, key: str) -> bool:
        """Whether the key is one of the pattern's."""
        return self.expression.fullmatch(key) is not None

    @cached_property
    def expression(self) -> re.Pattern[str]:
        """The pattern, with a group for each variable."""
        return re.compile("(.+)".join(map(re.escape, _VARIABLE.split(self.pattern))))

    @property
    def literal(self) -> int:
        """Characters outside of ``<…>``: of two patterns for a key the longer one is meant."""
        return len(_VARIABLE.sub("", self.pattern))


@cache
def catalogue() -> tuple[Metric, ...]:
    """All metrics, section by section. ValidationError for an entry that is none."""
    text = files(__package__).joinpath("metrics.yaml").read_text(encoding="utf-8")
    entries = [
        {"pattern": pattern, "section": section, **entry}
        for section, metrics in yaml.safe_load(text).items()
        for pattern, entry in metrics.items()
    ]
    return tuple(TypeAdapter(list[Metric]).validate_python(entries))


@lru_cache(maxsize=4096)
def find(key: str) -> Metric | None:
    """The metric of a key: of all patterns that match, the one with the most literal text."""
    found = [metric for metric in catalogue() if metric.matches(key)]
    return max(found, key=lambda metric: metric.literal, default=None)


def unknown(keys: set[str]) -> list[str]:
    """The keys of a line of ``metrics.jsonl`` that are not metrics of the catalogue, sorted."""
    return sorted(key for key in keys - {"step", "time"} if find(key) is None)
