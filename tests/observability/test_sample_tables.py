"""Which generations come into tables, and when."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.microscope import MICROSCOPE, RecordWriter
from async_opd.observability.wandb_sink import EVERY, SAMPLES, SampleTables
from tests.microscope.samples import record


@pytest.fixture
def writer(tmp_path: Path) -> RecordWriter:
    return RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 24)


def test_generations_are_those_of_the_newest_recorded_step(
    tmp_path: Path, writer: RecordWriter
) -> None:
    assert SampleTables(tmp_path).generations(100) is None  # without records
    for step in (3, 5, 9):
        writer.write(step, [record(f"p{step}/0", step=step)])
    found = SampleTables(tmp_path).generations(8)
    assert found is not None
    assert [row[found.columns.index("uid")] for row in found.rows] == ["p5/0"]


def test_generations_come_once_in_so_many_steps(tmp_path: Path, writer: RecordWriter) -> None:
    tables, came = SampleTables(tmp_path), []
    for step in range(1, 2 * EVERY + 2):
        writer.write(step, [record(step=step)])
        if tables.generations(step) is not None:
            came.append(step)
    assert came == [1, 1 + EVERY, 1 + 2 * EVERY]


def test_a_table_has_at_most_so_many_rows(tmp_path: Path, writer: RecordWriter) -> None:
    writer.write(1, [record(f"p{i}/0") for i in range(SAMPLES + 8)])
    found = SampleTables(tmp_path).generations(1)
    assert found is not None
    assert len(found.rows) == SAMPLES
