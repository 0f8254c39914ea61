"""What other loggers have of a run, read back through their own libraries."""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks import preflight
from async_opd.config.run_config import RunConfig
from async_opd.observability.loggers.threaded import MAX_ROWS, ThreadedSink
from async_opd.observability.run_log import RunLog
from async_opd.observability.sinks import Summary

SUMMARY = Summary("completed", None, 1, 1.0, Path("run"))


def config(*loggers: str) -> RunConfig:
    return RunConfig.model_validate(
        {
            "student": {"model": "student"},
            "teachers": {"sort": {"model": "teacher"}},
            "data": {"train": "train.jsonl"},
            "log": {"console": "off", "wandb": "off", "loggers": list(loggers), "project": "ours"},
            "name": "first",
            "timeouts": {"shutdown_s": 120},  # MLflow's import takes long beside other work
        }
    )


def recorded(run_dir: Path, *loggers: str, status: Any = "completed") -> None:
    with RunLog(config(*loggers), run_dir) as log:
        log.log(1, {"loss/total": 2.5, "eval/sort/mean@4": 0.25, "train/grad_norm": math.nan})
        log.log(2, {"loss/total": 1.5})
        log.finish(status)
    assert log.failures == 0, (run_dir / "run.log").read_text()


def test_tensorboard_has_the_scalars_of_each_step(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recorded(tmp_path, "tensorboard")
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    assert [(one.step, one.value) for one in found.Scalars("loss/total")] == [(1, 2.5), (2, 1.5)]
    assert sorted(found.Tags()["scalars"]) == ["eval/sort/mean@4", "loss/total"]


@pytest.mark.slow
@pytest.mark.parametrize(("status", "ended"), [("completed", "FINISHED"), ("failed", "FAILED")])
def test_mlflow_has_metrics_config_and_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: str, ended: str
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recorded(tmp_path, "mlflow", status=status)
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    experiment = client.get_experiment_by_name("ours")
    (run,) = client.search_runs([experiment.experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss/total")
    assert [(one.step, one.value) for one in history] == [(1, 2.5), (2, 1.5)]
    assert run.data.metrics["eval/sort/mean_at_4"] == 0.25
    assert run.data.params["student.model"] == "student"
    assert (run.info.status, run.info.run_name) == (ended, "first")


TRACKIO = """
import sys
from pathlib import Path
import trackio
from tests.observability.loggers.test_loggers import recorded
recorded(Path(sys.argv[1]), "trackio")
(run,) = trackio.Api().runs("ours")
assert run.name == "first", run.name
from trackio.sqlite_storage import SQLiteStorage
rows = SQLiteStorage.get_logs("ours", "first")
assert [(row["step"], row["loss/total"]) for row in rows] == [(1, 2.5), (2, 1.5)], rows
"""


@pytest.mark.slow
def test_trackio_has_the_rows_in_its_database(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    own = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", TRACKIO, str(tmp_path / "run")]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_logger_that_is_not_installed_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "mlflow" else found(name)
    )
    problems = preflight.preflight(config("tensorboard", "mlflow"), "c.yaml").problems
    (refused,) = [one for one in problems if one.key == "log.loggers"]
    assert refused.message == "mlflow is not installed"
    assert refused.remedy == "pip install 'async-opd[mlflow]'"


def test_a_logger_that_is_named_twice_is_refused() -> None:
    with pytest.raises(ValueError, match="named twice"):
        config("mlflow", "mlflow")


class Failing:
    """A library that fails as it is told."""

    def __init__(self, opens: bool = True) -> None:
        if not opens:
            raise ConnectionError("no server")

    def write(self, step: int, metrics: Any) -> None:
        raise ConnectionError(f"step {step} was refused")

    def end(self, summary: Summary) -> None: ...


@pytest.mark.parametrize("opens", [True, False])
def test_a_logger_that_fails_is_told_of_and_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, opens: bool
) -> None:
    sink = ThreadedSink("mlflow", lambda: Failing(opens), 10.0)
    with RunLog(config(), tmp_path, sinks=[sink]) as log:
        log.log(1, {"loss/total": 1.0})
        assert log.finish("completed") == "completed"
    assert log.failures >= 1
    told = (tmp_path / "run.log").read_text()
    assert "mlflow failed: ConnectionError" in told
    assert "the run goes on" in told


def test_rows_that_a_slow_logger_does_not_take_are_counted() -> None:
    sink = ThreadedSink("mlflow", lambda: Failing(), 10.0)
    sink._writer.put = lambda _: False  # type: ignore[method-assign]
    for step in range(3):
        sink.log(step, {})
    assert sink.close(SUMMARY) == "mlflow lacks 3 rows: it was behind"
    assert MAX_ROWS >= 1000
