"""Answers and generations for a logger's tables: columns, rows of text, and thumbnails.

evals/step_N.jsonl ──► an evaluation's first answers
microscope/step_N… ──► generations of a step that was trained (``log.microscope``)
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from async_opd.files.foreign import ForeignPath, foreign
from async_opd.microscope.folder import MICROSCOPE, files, records
from async_opd.microscope.record import SampleRecord
from async_opd.pictures.folder import thumbnail_file

SAMPLES = 32
"""Rows of a table."""
EVERY = 25
"""Steps from one table of generations to the next."""


@dataclass(frozen=True)
class SampleTable:
    """Rows of text under columns, and the thumbnails of each row's images, in order.

    An image without a thumbnail is None.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    images: Sequence[Sequence[ForeignPath | None]] = ()


@dataclass
class SampleTables:
    """The tables of a run directory."""

    run_dir: Path
    _step: int = field(default=-EVERY, init=False)

    def answers(self, step: int, metrics: Mapping[str, float]) -> SampleTable | None:
        """The first answers of the evaluation that has these metrics; None without its file."""
        of_teachers = any(key.startswith("eval_teacher/") for key in metrics)
        name = "teachers" if of_teachers else f"step_{step}"
        path = foreign(self.run_dir) / "evals" / f"{name}.jsonl"
        if not path.exists():
            return None
        return self._table([json.loads(line) for line in islice(path.lines(), SAMPLES)])

    def generations(self, step: int) -> SampleTable | None:
        """Of the newest recorded step up to this one, at most once in ``EVERY`` steps; else None.

        Ranks write a step's records after the step: the newest ones may be some steps old.
        """
        if step < self._step + EVERY:
            return None
        steps = {of for of, _ in files(self.run_dir / MICROSCOPE) if self._step < of <= step}
        if not steps:
            return None
        self._step = max(steps)
        found = islice(records(self.run_dir, [self._step]), SAMPLES)
        return self._table([_generation(one) for one in found])

    def _table(self, entries: Sequence[dict[str, Any]]) -> SampleTable:
        """One column for each key; a table's columns hold one type: text."""
        given = [entry.pop("images", ()) for entry in entries]
        images = [[thumbnail_file(self.run_dir, one["sha256"]) for one in own] for own in given]
        columns = list(dict.fromkeys(key for entry in entries for key in entry))
        rows = [[_cell(entry.get(key)) for key in columns] for entry in entries]
        return SampleTable(columns, rows, images)


def _generation(record: SampleRecord) -> dict[str, Any]:
    """One row: the sample, its response, and means over the tokens of loss and gap, in nats."""
    versions = record["version"]
    return {
        "step": record.step,
        "uid": record.uid,
        "data source": record.data_source,
        "teacher": record.teacher,
        "images": [image._asdict() for image in record.images],
        "prompt": record.prompt,
        "response": "".join(map(record.text, record["token"])),
        "response tokens": record.response_tokens,
        "finish reason": record.finish_reason,
        "versions": sorted({int(version) for version in versions}),
        "reward": record.reward,
        "mean loss": _mean(record.loss),
        "mean gap": _mean(record.gap),
    }


def _mean(values: Any) -> float | None:
    return round(float(values.mean()), 6) if len(values) else None


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
