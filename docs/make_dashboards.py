"""Writes docs/dashboards.md from ``async_opd/observability/metrics.yaml``.

python docs/make_dashboards.py
"""

from __future__ import annotations

import sys
from itertools import groupby
from pathlib import Path

from async_opd.observability.metric_catalogue import Panel, panels

HEAD = """# Dashboards

Made by `python docs/make_dashboards.py` from `async_opd/observability/metrics.yaml`.
`async_opd dashboard RUN_DIR|CONFIG` saves these panels as a wandb workspace of the config's
`log.project` (`pip install 'async-opd[dashboard]'`); with a RUN_DIR and a login `--project` has to
name it, because somebody else may have named the project of the run. Without a login it writes
`dashboard.json` and prints the command that saves it. The axis is the step; of weight syncs the
weight version, and of evaluations the step whose weights they measured. [metrics.md](metrics.md)
has the unit and meaning of each key.

Two tables are logged beside the panels: `evaluation/samples`, the first 32 answers of each
evaluation, and, with `log.microscope.share` above 0, `generations/samples`: responses that were
trained, every 25 steps. `log.samples: false` leaves both out.
"""


def entry(panel: Panel) -> str:
    """A panel's paragraphs."""
    keys = ", ".join(f"`{key}`" for key in panel.keys)
    lines = [f"{panel.shows} ({keys})", f"**Normal** {panel.normal}"]
    return "\n\n".join([f"### {panel.title}", *lines, f"**Otherwise** {panel.otherwise}"]) + "\n"


def document() -> str:
    """The whole file."""
    parts = [HEAD]
    for section, own in groupby(panels(), key=lambda panel: panel.section):
        parts += [f"## {section}\n", *map(entry, own)]
    return "\n".join(parts)


if __name__ == "__main__":
    target = Path(__file__).parent / "dashboards.md"
    target.write_text(document(), encoding="utf-8")
    sys.stdout.write(f"{target}\n")
