"""The files of a run directory that grow, and what a checkpoint keeps of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_opd import job as jobs
from async_opd.accounting.journal import LEDGER, Journal
from async_opd.job import Job
from async_opd.observability.run_log import DEAD_LETTERS, METRICS


@pytest.mark.parametrize("there", [(), (METRICS,), (METRICS, DEAD_LETTERS)])
def test_rows_and_dead_letters_are_on_the_disk_before_the_checkpoint_that_they_belong_to(
    there: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(jobs, "flush", lambda path: flushed.append(path.open().name))
    for name in there:
        (tmp_path / name).write_text("{}\n")
    absent: Any = None
    with Journal(tmp_path / LEDGER) as journal:
        Job(absent, tmp_path, None, absent, journal).sync()
    assert flushed == [str(tmp_path / name) for name in there]
