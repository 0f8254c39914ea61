"""A stranger's run directory: numbers, kinds and depths of its files that no run writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_opd.accounting.journal import LEDGER
from async_opd.config.load import dump_config, load_config
from async_opd.core.errors import CheckpointError, ConfigError
from async_opd.files.lines import MOST_S, metrics_row, number_of
from async_opd.files.origin import ORIGIN, read_origins
from async_opd.files.run_format import write_run_format
from async_opd.observability.live.live_file import LIVE_FILE, read_live
from async_opd.observability.run_log import DEAD_LETTERS, METRICS, SUMMARY
from async_opd.tools.report.recorded_run import read_recorded_run, read_summary
from tests.fuzz.command import command
from tests.world.config import run_config as config

pytestmark = pytest.mark.slow

HUGE = 10**400
ODD = [HUGE, float("nan"), float("inf"), float("-inf"), 1.7e308]
ROW = {"step": 1, "time": 1.0, "perf/step_s": 1.0, "loss/total": 1.0, "perf/samples_per_s": 1.0}
LETTER = {"time": 0, "uid": "0:1", "teacher": "a", "tokens": 9, "stage": "grader", "reason": "x"}
LIVE = {"pid": 1, "host": "a", "born": 5, "started": 1.0, "time": 2.0, "waits": {}}
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    write_run_format(folder)
    (folder / "config.yaml").write_text(dump_config(config()))
    (folder / METRICS).write_text(json.dumps(ROW) + "\n")
    (folder / LEDGER).touch()
    return folder


@pytest.mark.parametrize("odd", ODD)
def test_a_number_that_cannot_be_added_or_shown_is_no_number(odd: float) -> None:
    assert number_of(odd) is None


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("key", ["step", "time"])
def test_a_row_of_no_step_or_time_is_left_out(key: str, odd: float) -> None:
    assert metrics_row(json.dumps(ROW | {key: odd})) is None


@pytest.mark.parametrize("odd", ODD[1:])
def test_a_value_that_no_sum_can_have_is_left_out_of_its_row(odd: float) -> None:
    row = metrics_row(json.dumps(ROW | {"loss/total": odd}))
    assert row is not None
    assert row.values.keys() == ROW.keys() - {"step", "time", "loss/total"}


@pytest.mark.parametrize("odd", ODD)
def test_a_summary_keeps_its_other_metrics(run_dir: Path, odd: float) -> None:
    content = {"status": "completed", "seconds": 1, "steps": 1, "a/b": odd, "c/d": 2}
    (run_dir / SUMMARY).write_text(json.dumps(content))
    summary = read_summary(run_dir)
    assert summary is not None
    assert summary.metrics == {"c/d": 2.0}


@pytest.mark.parametrize(
    "change",
    [
        *({"seconds": odd} for odd in (*ODD, 2 * MOST_S)),
        {"steps": HUGE},
        {"error": {"a": [1]}},
        {"status": ["completed"]},
    ],
)
def test_a_summary_of_odd_values_is_none(run_dir: Path, change: dict[str, Any]) -> None:
    content = {"status": "completed", "seconds": 1, "steps": 1}
    (run_dir / SUMMARY).write_text(json.dumps(content | change))
    assert read_summary(run_dir) is None


@pytest.mark.parametrize(
    "change", [{"stage": []}, {"uid": 5}, {"tokens": HUGE}, {"time": "inf"}, {"other": 1}]
)
def test_a_dead_letter_of_odd_values_is_none(run_dir: Path, change: dict[str, Any]) -> None:
    lines = [LETTER, LETTER | change]
    (run_dir / DEAD_LETTERS).write_text("".join(json.dumps(one) + "\n" for one in lines))
    assert [one.uid for one in read_recorded_run(run_dir).dead_letters] == ["0:1"]


@pytest.mark.parametrize(
    "change", [{"time": HUGE}, {"started": float("inf")}, {"pid": "x"}, {"waits": [1]}]
)
def test_a_live_file_of_odd_values_is_none(run_dir: Path, change: dict[str, Any]) -> None:
    (run_dir / LIVE_FILE).write_text(json.dumps(LIVE))
    assert read_live(run_dir) is not None
    (run_dir / LIVE_FILE).write_text(json.dumps(LIVE | change))
    assert read_live(run_dir) is None


@pytest.mark.parametrize("time", ['"inf"', "NaN", "1e308", "1" + "0" * 400])
def test_an_origin_without_a_date_is_none(run_dir: Path, time: str) -> None:
    origin = f'[{{"command": "x", "versions": {{}}, "commit": "", "time": {time}}}]'
    (run_dir / ORIGIN).write_text(origin)
    assert read_origins(run_dir) == []


FILES: dict[str, str] = {
    METRICS: "".join(
        json.dumps(ROW | {"step": at, "loss/total": 1.7e308}) + "\n" for at in range(9)
    )
    + json.dumps(ROW | {"step": HUGE})
    + "\n",
    SUMMARY: '{"status": "completed", "seconds": Infinity, "steps": 1}',
    ORIGIN: '[{"command": "x", "versions": {}, "commit": "", "time": "inf", "device": "cuda"}]',
    DEAD_LETTERS: json.dumps(LETTER | {"stage": []}) + "\n",
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.usefixtures("one_bundle")
def test_the_readers_of_a_run_directory_end_with_what_is_left_of_it(
    run_dir: Path, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_opd.tools.watch.SILENT_S", 0.0)
    (run_dir / name).write_text(FILES[name])
    assert command("report", str(run_dir), "--no-plan").code == 0
    assert command("compare", str(run_dir), "--out", str(tmp_path / "c.html")).code == 0
    assert command("watch", str(run_dir)).code in (0, 1)


@pytest.mark.parametrize("inner", [lambda: nested(900, "["), lambda: nested(700, "{")])
def test_a_mapping_that_is_nested_too_deep_is_no_config(inner: Callable[[], Any]) -> None:
    with pytest.raises(ConfigError, match="more than 64 values inside of each other"):
        load_config({"train": inner()})


def nested(depth: int, kind: str) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value] if kind == "[" else {"a": value}
    return value


def test_a_deep_text_in_a_file_of_tensors_is_a_damaged_checkpoint(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    from trainer.saving.shards import Shards, shard_name

    about = {"parts": DEEP, "step": "1", "version": "1", "rank": "0", "ranks": "1", "id": "a"}
    save_file({"model/a": torch.zeros(1)}, tmp_path / shard_name(0, 1), metadata=about)
    with pytest.raises(CheckpointError, match="RecursionError"):
        Shards(tmp_path)
