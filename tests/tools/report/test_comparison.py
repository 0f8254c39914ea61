"""The figures and the recommendation of several runs beside each other."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.files.foreign import foreign
from async_opd.files.lines import MetricsRow
from async_opd.tools.report.comparison import figures_of, recommended
from async_opd.tools.report.recorded_run import Message, RecordedRun
from tests.tools.plan.runs import write_run
from tests.world.cli import Cli
from tests.world.config import run_config

START = 1000.0


def run(
    folder: Path, threshold: float, sync_steps: int, *evaluations: tuple[float, float]
) -> RecordedRun:
    """A run with evaluations (seconds after its start, mean accuracy of two sources)."""
    settings = {"staleness_threshold": threshold, "sync_steps": sync_steps}
    rows = tuple(
        MetricsRow(
            step,
            START + seconds,
            {"eval/a/accuracy": accuracy - 0.1, "eval/b/accuracy": accuracy + 0.1},
        )
        for step, (seconds, accuracy) in enumerate(evaluations, 1)
    )
    wasted = MetricsRow(9, START + 900, {"waste/share": 0.25})
    return RecordedRun(
        foreign(folder / f"s{threshold:g}-k{sync_steps}"),
        run_config(**{"async": settings}),
        (*rows, wasted),
        (Message(START, "starting"),),
        None,
        (),
        (),
    )


def test_the_pair_of_the_run_that_is_first_nearly_as_good_as_the_best_is_recommended(
    tmp_path: Path,
) -> None:
    slow = run(tmp_path, 0, 1, (100, 0.3), (600, 0.8))
    quick = run(tmp_path, 1, 4, (100, 0.5), (200, 0.77))
    found = recommended([slow, quick])
    assert found == (
        "recommended async.staleness_threshold=1 async.sync_steps=4: s1-k4 has an accuracy of "
        "76.0% (95% of the highest) after 0:03:20, the first one after 0:03:20; 2 of 2 runs came "
        "so far"
    )


def test_of_runs_with_close_times_the_less_stale_one_is_recommended(tmp_path: Path) -> None:
    runs = [run(tmp_path, 2, 1, (200, 0.8)), run(tmp_path, 0.5, 1, (208, 0.8))]
    assert "staleness_threshold=0.5" in recommended(runs)


def test_a_quick_run_that_never_comes_near_the_best_is_not_recommended(tmp_path: Path) -> None:
    runs = [run(tmp_path, 2, 1, (10, 0.5)), run(tmp_path, 0, 1, (900, 0.8))]
    assert "staleness_threshold=0 " in recommended(runs)
    assert "1 of 2 runs" in recommended(runs)


@pytest.mark.parametrize("evaluations", [(), ((100, 0.8),)])
def test_runs_without_evaluations_or_with_the_same_pair_have_no_recommendation(
    tmp_path: Path, evaluations: tuple[tuple[float, float], ...]
) -> None:
    other = 2 if not evaluations else 0
    pair = [run(tmp_path, 0, 1, *evaluations), run(tmp_path, other, 1, *evaluations)]
    assert recommended(pair) == ""


def test_the_figures_have_the_time_to_the_goal_and_the_tokens_thrown_away(tmp_path: Path) -> None:
    _, rows = figures_of([run(tmp_path, 0, 1, (600, 0.8)), run(tmp_path, 1, 1, (10, 0.1))])
    assert ("time to 76.0%", "0:10:00", "–") in rows
    assert ("tokens thrown away", "25.0%", "25.0%") in rows


@pytest.mark.slow
def test_one_run_has_no_keys_that_differ_and_its_verdict_below_the_table(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "mine")
    monkeypatch.chdir(tmp_path)
    printed = cli("compare", "mine").out
    assert "keys that differ" not in printed
    (verdict,) = [line for line in printed.splitlines() if "verdict" in line]
    assert verdict.startswith("verdict     mine: ")
