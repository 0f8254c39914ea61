"""The measurements for a GPU: their cells, their races of streams, their tables."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import varlen

from async_opd.config.sections.train import TrainConfig
from benchmarks.gpu import all as runner
from benchmarks.gpu import rank, streams, tables
from benchmarks.gpu.measuring import Report, Skip
from benchmarks.gpu.students import TrainSettings
from trainer.notes import note

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")


def test_the_settings_without_pydantic_are_those_of_the_config() -> None:
    assert dataclasses.asdict(TrainSettings()) == TrainConfig().model_dump()


def test_an_older_varlen_attn_is_called_without_the_argument_that_it_lacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def older(query: str, scale: float | None = None, window_size: tuple[int, int] = (0, 0)) -> Any:
        return query, scale, window_size

    monkeypatch.setattr(varlen, "varlen_attn", older)
    rank.add_grouped_queries_to_varlen()
    told = varlen.varlen_attn("query", scale=0.5, window_size=(3, 0), enable_gqa=True)
    assert told == ("query", 0.5, (3, 0))
    found = varlen.varlen_attn
    rank.add_grouped_queries_to_varlen()
    assert varlen.varlen_attn is found


# ── cells ──────────────────────────────────────────────────────────────────────────────────────


def raising(error: Exception) -> Callable[[], dict[str, Any]]:
    def work() -> dict[str, Any]:
        raise error

    return work


@pytest.mark.parametrize(
    ("error", "expected", "code"),
    [
        (Skip("no GPU"), {"skipped": "no GPU"}, 0),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB. GPU 0 has"),
            {"out_of_memory": "CUDA out of memory. Tried to allocate 9 GiB"},
            0,
        ),
        (ValueError("wrong"), {"failed": "ValueError: wrong"}, 1),
    ],
)
def test_a_cell_without_figures_says_why_and_the_next_one_is_measured(
    error: Exception,
    expected: dict[str, str],
    code: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    report = Report("some", CPU)
    report.cell(raising(error), size=1)
    report.cell(lambda: {"ms": 2.0}, size=2)
    try:
        report.end()
        ended = 0
    except SystemExit as end:
        ended = int(str(end.code))
    assert ended == code
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["cells"] == [{"size": 1, **expected}, {"size": 2, "ms": 2.0}]


def test_a_cell_has_what_the_trainer_would_log() -> None:
    def work() -> dict[str, Any]:
        note("it runs eagerly")
        return {"ms": 1.0}

    report = Report("some", CPU)
    report.cell(work)
    report.cell(lambda: {"ms": 2.0})
    assert report.cells == [{"ms": 1.0, "notes": "it runs eagerly"}, {"ms": 2.0}]


def test_no_cell_begins_after_the_time_of_its_script() -> None:
    report = Report("some", CPU, seconds=5.0)
    report.started -= 6
    report.cell(raising(AssertionError("it began")), size=1)
    assert report.cells == [{"size": 1, "skipped": "its 5 seconds were over"}]


# ── races of streams ───────────────────────────────────────────────────────────────────────────


class Late(streams.Steps):
    """As on a GPU: a copy gets its values only after ``named_weights`` has returned it."""

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in super().named_weights():
            yield name, torch.zeros_like(weight) if name == "1" else weight


def test_a_tensor_that_was_sent_before_its_copy_was_made_is_counted() -> None:
    found = asyncio.run(
        streams.synced(Late(CPU), streams.PackedSender(CPU), pool=False, hasty=True)
    )
    assert found["wrong_received"] == streams.VERSIONS
    assert found["wrong_trained"] == 0


class Stream:
    """A stream that does everything at once."""

    def synchronize(self) -> None: ...


def test_the_transport_of_gpus_sends_every_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "current_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    found = asyncio.run(
        streams.synced(streams.Steps(CPU), streams.OwnSender(CPU), pool=False, hasty=False)
    )
    assert found["of_received"] == 4 * streams.VERSIONS
    assert (found["wrong_trained"], found["wrong_received"]) == (0, 0)


def test_a_tensor_whose_update_was_lost_is_counted() -> None:
    steps = streams.Steps(CPU)
    steps.train_batch(())
    before = steps.weights[0].clone()
    steps.train_batch(())
    steps.weights[0].copy_(before)
    assert steps.wrong() == 1


# ── all of them, and their tables ──────────────────────────────────────────────────────────────


def saying(*lines: str, then: str = "") -> list[str]:
    code = "".join(f"print({line!r}, flush=True);" for line in lines)
    return [sys.executable, "-c", f"import sys, time;{code}{then}"]


CELL, WHOLE = '{"cell": {"size": 1}}', '{"name": "some", "cells": [{"size": 1}]}'


def test_a_script_that_ends_leaves_its_last_line(tmp_path: Path) -> None:
    found = runner.outcome(saying("a warning", CELL, WHOLE), 60, tmp_path / "log")
    assert found == {"name": "some", "cells": [{"size": 1}], "ended": "done"}


def test_a_script_at_its_limit_leaves_the_cells_it_measured(tmp_path: Path) -> None:
    found = runner.outcome(saying(CELL, then="time.sleep(60)"), 1.5, tmp_path / "log")
    assert found == {"cells": [{"size": 1}], "ended": "killed after 2 s"}


def test_a_script_that_fails_leaves_its_cells_and_its_last_words(tmp_path: Path) -> None:
    found = runner.outcome(saying(CELL, "no driver", then="sys.exit(3)"), 60, tmp_path / "log")
    assert found == {"cells": [{"size": 1}], "ended": "exit code 3: no driver"}


def test_a_script_has_the_settings_that_its_environment_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIVEN", "outside")
    told = "import os; print(os.environ['GIVEN'], os.environ['MISSING']); sys.exit(1)"
    settings = {"GIVEN": "here", "MISSING": "here"}
    found = runner.outcome(saying(then=told), 60, tmp_path / "log", settings)
    assert found["ended"] == "exit code 1: outside here"


RESULTS = {
    "rank": {
        "cells": [
            {"what": "peak", "tflops": 700.0},
            {"what": "step", "tokens": 4096, "tokens_per_s": 12345.6},
            {"what": "step", "tokens": 32768, "out_of_memory": "tried 9 GiB | more"},
        ],
        "device_name": "some GPU",
        "device_gib": 79.2,
        "date": "2026-01-02",
        "versions": {"torch": "2.13"},
        "ended": "done",
    },
    "fsdp": {"cells": [], "ended": "killed after 60 s"},
}


def test_tables_have_a_row_for_each_cell_and_a_reason_for_one_without_figures() -> None:
    text = tables.document(RESULTS)
    assert "some GPU (79.2 GiB), 2026-01-02; torch 2.13" in text
    assert "| tokens | tokens_per_s | note |" in text
    assert "| 4096 | 1.235e+04 |  |" in text
    assert "| 32768 |  | out of memory: tried 9 GiB / more |" in text


def test_what_did_not_run_is_named() -> None:
    assert tables.unmeasured(RESULTS) == [
        "rank, what step, tokens 32768: out of memory: tried 9 GiB / more",
        "fsdp: killed after 60 s",
    ]


def test_only_the_tables_of_a_document_are_replaced() -> None:
    text = f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n"
    assert tables.written(text, "new") == f"before\n{tables.BEGIN}\nnew\n{tables.END}\nafter\n"
    with pytest.raises(ValueError, match="figures: begin"):
        tables.written("nothing", "new")
