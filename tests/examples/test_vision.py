"""The rows that examples/vision/make.py writes are read as data; none is in both files."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from async_opd.config.sections.data import DataConfig
from async_opd.data.files import FileSource
from async_opd.data.stored_rows import StoredRows, read_source

VISION = Path(__file__).parents[2] / "examples" / "vision"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, StoredRows]:
    """The rows of both files of a small run of the script."""
    out = tmp_path_factory.mktemp("vision")
    sizes = ["--train", "48", "--eval", "16"]
    command = [sys.executable, str(VISION / "make.py"), "--out", str(out), *sizes]
    subprocess.run(command, check=True, timeout=100, capture_output=True)
    names = ("train", "eval")
    sources = {name: FileSource(path=str(out / "data" / f"{name}.parquet")) for name in names}
    return {name: read_source(one, 0, DataConfig(train=[])) for name, one in sources.items()}


@pytest.mark.parametrize(("part", "expected"), [("train", 48), ("eval", 16)])
def test_each_task_has_its_rows(made: dict[str, StoredRows], part: str, expected: int) -> None:
    counts = Counter((row.data_source, len(row.images)) for row in made[part])
    pictured = {("count", 1), ("larger", 1), ("digit", 1)}
    assert counts == dict.fromkeys({*pictured, ("sort", 0)}, expected)


def test_no_question_is_evaluated_on_that_is_trained_on(made: dict[str, StoredRows]) -> None:
    train, evaluation = (
        {row.images[0].sha256 if row.images else str(row.prompt) for row in made[part]}
        for part in ("train", "eval")
    )
    assert (len(train), len(evaluation), len(train & evaluation)) == (192, 64, 0)
