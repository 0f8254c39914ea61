"""Writes docs/metrics.md from ``async_opd/observability/metrics.yaml``.

python docs/make_metrics.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from async_opd.observability.metric_catalogue import SECTIONS, Metric, catalogue

HEAD = """# Metrics

Made by `python docs/make_metrics.py` from `async_opd/observability/metrics.yaml`. The console,
`metrics.jsonl`, wandb and all other loggers have the same keys. `<name>` stands for a name; a unit
of 1 is a number without one. q is the student, p a teacher, mu the distribution that was sampled.
Of the others' names only those are given that stand for the same quantity; the denominators of
theirs may differ.
"""
COLUMNS = "| key | unit | meaning | verl | TRL | miles |\n|---|---|---|---|---|---|"


def row(metric: Metric) -> str:
    """A line of a section's table."""
    cells = [f"`{metric.pattern}`", metric.unit, metric.meaning.replace("|", "\\|")]
    others = (metric.verl, metric.trl, metric.miles)
    return f"| {' | '.join([*cells, *(f'`{name}`' if name else '' for name in others)])} |"


def sections() -> Iterator[str]:
    """A table a section."""
    for section in SECTIONS:
        rows = [row(metric) for metric in catalogue() if metric.section == section]
        yield "\n".join([f"## {section}", "", COLUMNS, *rows, ""])


def document() -> str:
    """The whole file."""
    return "\n".join([HEAD, *sections()])


if __name__ == "__main__":
    target = Path(__file__).parent / "metrics.md"
    target.write_text(document(), encoding="utf-8")
    sys.stdout.write(f"{target}\n")
