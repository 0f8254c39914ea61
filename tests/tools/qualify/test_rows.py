"""The rows of ``qualify``: all parts of docs/status.md without proof have one."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest
import torch

from async_opd.checks import gpu_memory, resources
from async_opd.config.load import load_config
from async_opd.config.precision import SCHEMES
from async_opd.memory import pools
from async_opd.tools.qualify import tables
from async_opd.tools.qualify.rows import ROWS, Bound, Cell

ROOT = Path(__file__).parents[3]
STATUS = (ROOT / "docs" / "status.md").read_text()
UNPROVEN = [line for line in STATUS.splitlines() if line.startswith("| ") and "nothing" in line]


@pytest.mark.parametrize("line", UNPROVEN, ids=lambda line: line[2:60])
def test_a_part_without_proof_has_its_rows_in_qualify(line: str) -> None:
    _, *after = line.split("nothing")
    for part in after:
        named = re.search(r"`qualify` rows? ((?:`\w+`,? ?)+)", part)
        assert named, f"docs/status.md names no row of qualify here: {part}"
        assert set(re.findall(r"`(\w+)`", named[1])) <= ROWS.keys()


def test_a_row_that_no_gpu_has_run_is_named_by_the_status() -> None:
    unproven = {name for line in UNPROVEN for name in re.findall(r"`(\w+)`", line)}
    shown = set(re.findall(r"GPU: [^|]*", STATUS))
    named = unproven | {name for part in shown for name in re.findall(r"`(\w+)`", part)}
    assert set(ROWS) - named == set()


def test_the_rows_that_need_torch_only_end_within_40_minutes() -> None:
    assert sum(row.minutes for row in ROWS.values() if not row.packages) <= 40


def test_every_row_fits_a_slice_of_ten_minutes() -> None:
    assert max(row.minutes for row in ROWS.values()) < 10


def test_layers_compiled_with_flash_attention_are_of_its_row_and_others_of_theirs() -> None:
    from async_opd.tools.qualify.measurements.rank import cells, kind_of

    found = {(one.attention, kind_of(one)) for one in cells(torch.device("cuda"), ["a"], (1, 2, 3))}
    assert {("flash", "flash"), ("flex", "compiled"), ("auto", "compiled")} <= found
    assert ("flash", "compiled") not in found


@pytest.mark.parametrize("fault", [{"compiled": False}, {"apart": 9.0}])
def test_a_compiled_step_with_flash_attention_is_held_to_eager_layers(fault: Cell) -> None:
    cell = {"what": "step", "compile": True, "compiled": True, "apart": 0.01, "peak_ratio": 0.5}
    eager = {"what": "step", "compile": False, "peak_ratio": 1.0}
    others: list[Cell] = [eager, {"what": "check", "check_s": 1.0}]
    assert ROWS["flash"].broken([*others, cell], "cuda") == []
    assert len(ROWS["flash"].broken([*others, {**cell, **fault}], "cuda")) == 1


@pytest.mark.slow
def test_every_row_has_its_module() -> None:
    for row in ROWS.values():
        if not row.packages:
            name = f"async_opd.tools.qualify.measurements.{row.module}"
            assert callable(importlib.import_module(name).main)


def test_every_row_has_a_criterion() -> None:
    assert [name for name, row in ROWS.items() if not row.bounds] == []


@pytest.mark.parametrize(
    ("cells", "broken"),
    [
        ([{"x": 1.0}, {"x": 2.0}], []),
        ([{"x": 2.5}, {"x": 1.0}], ["x at least 1 and at most 2: 2.5"]),
        ([{"x": 0.5}], ["x at least 1 and at most 2: 0.5"]),
        ([{"x": float("nan")}], ["x at least 1 and at most 2: nan"]),
        ([{"y": 1.0}], ["x at least 1 and at most 2: not in the cell y 1.0"]),
        ([{"x": 1.0}, {"y": 1.0}], ["x at least 1 and at most 2: not in the cell y 1.0"]),
        ([{"x": 1.0}, {"y": 1.0, "skipped": "flash-attn is absent"}], []),
        ([{"skipped": "no GPU"}], ["x at least 1 and at most 2: no cell has this figure"]),
        ([], ["x at least 1 and at most 2: no cell has this figure"]),
        ([{"not_reached": "the row has 60 seconds"}], []),
    ],
)
def test_a_bound_is_broken_by_a_figure_beyond_it_and_by_none(
    cells: list[Cell], broken: list[str]
) -> None:
    assert Bound("x", 2, 1).broken(cells) == broken


def test_a_bound_of_some_cells_does_not_hold_for_others() -> None:
    bound = Bound("x", 2, of={"way": "a"})
    assert bound.broken([{"way": "a", "x": 1}, {"way": "b", "x": 9}]) == []
    assert str(bound) == "x at most 2 (way a)"


def test_the_bounds_of_the_planner_are_those_of_the_rows() -> None:
    bounds = {(name, one.figure): one.most for name, row in ROWS.items() for one in row.bounds}
    assert bounds["snapshot", "context_gib"] == pools.CONTEXT / 2**30
    assert bounds["ranks", "communicator_gib"] == pools.COMMUNICATOR / 2**30
    assert bounds["sleep", "asleep_gib"] == gpu_memory.ASLEEP / 2**30
    of_two = gpu_memory.ASLEEP + pools.COMMUNICATOR
    assert bounds["parallel_sleep", "asleep_gib"] == of_two / 2**30


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.module == "runs"])
def test_the_configs_of_runs_take_the_gpus_that_the_row_says(name: str) -> None:
    from async_opd.tools.qualify.measurements.runs import RUNS

    for cell in ROWS[name].given:
        overrides = [one.replace("{mixture}", "models/mixture") for one in RUNS[cell]]
        config = load_config(str(ROOT / "examples" / "quickstart.yaml"), overrides)
        gpus = sum(pool.gpus for pool in resources.pools(config))
        assert gpus == ROWS[name].gpus or name == "cluster"


def test_every_scheme_of_quantization_has_a_run() -> None:
    assert ROWS["quantized"].given == [f"quantized: {name}" for name in SCHEMES]


STREAMS = [
    {"transport": sender, "threads": "own", "event": event, "wrong_trained": 0, "wrong_received": n}
    for sender in ("vllm", "own")
    for event, n in (("none", 512), ("waits", 0))
]


def test_a_planted_fault_that_no_tensor_shows_fails_the_row_of_streams_on_a_gpu() -> None:
    assert ROWS["streams"].broken(STREAMS, "cuda") == []
    harmless = [{**cell, "wrong_received": 0} for cell in STREAMS]
    assert len(ROWS["streams"].broken(harmless, "cuda")) == 2
    assert ROWS["streams"].broken(harmless, "cpu") == []


def test_layers_that_were_not_compiled_fail_their_row() -> None:
    cell = {"what": "step", "shape": "qwen3-0.6b", "apart": 0.0, "compiled": True}
    assert ROWS["compiled"].broken([cell], "cuda") == []
    eager = {**cell, "compiled": False}
    assert ROWS["compiled"].broken([eager], "cuda") == ["compiled at least 1 (what step): 0"]


@pytest.mark.parametrize("ratio", [0.5, 2.0, float("nan")])
def test_a_gradient_of_a_wrong_scale_fails_the_row_of_ranks(ratio: float) -> None:
    cell = {"what": "mesh", "difference": 0.01, "norm_ratio": 1.0, "communicator_gib": 0.3}
    alone = {"what": "alone", "gradient_norm": 2.0}
    assert ROWS["ranks"].broken([alone, cell], "cuda") == []
    assert len(ROWS["ranks"].broken([alone, {**cell, "norm_ratio": ratio}], "cuda")) == 1


def test_the_document_has_the_rows_as_the_code_has_them() -> None:
    text = (ROOT / "docs" / "gpu.md").read_text()
    assert tables.rows_between(text) == tables.rows_table()


REPORT = {
    "machine": {
        "gpus": 1,
        "device_name": "H200",
        "device_gib": 139.8,
        "versions": {"torch": "2.13"},
    },
    "rows": {
        "weights": {
            "outcome": "failed",
            "why": ["wrong at most 0: 2"],
            "seconds": 3.5,
            "date": "2026-11-27",
            "cells": [{"backend": "gloo", "wrong": 2}, {"backend": "nccl", "skipped": "a | b"}],
        },
        "absent": {"outcome": "could not run", "why": ["it needs vllm"], "cells": []},
    },
}


def test_a_report_is_rendered_with_its_failures_and_what_did_not_run(tmp_path: Path) -> None:
    page = tmp_path / "gpu.md"
    page.write_text(f"before\n{tables.BEGIN}\nold\n{tables.END}\nafter\n")
    page.write_text(tables.written(page.read_text(), tables.document(REPORT)))
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "1 GPU, H200 (139.8 GiB); torch 2.13" in text
    assert "| gloo | 2 |  |\n| nccl |  | skipped: a / b |" in text
    assert "- weights: failed: wrong at most 0: 2\n" in text
    assert "- absent: could not run: it needs vllm\n" in text


def test_a_document_without_the_lines_for_the_figures_is_refused() -> None:
    with pytest.raises(ValueError, match="the document needs a line"):
        tables.written("text", "figures")
