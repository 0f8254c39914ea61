"""The data of a run in other loggers, read back through their own libraries."""

from __future__ import annotations

import math
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks import preflight, user_code
from async_opd.config.run_config import RunConfig
from async_opd.observability.loggers import MAX_ROWS, ThreadedSink
from async_opd.observability.run_log import RunLog
from async_opd.observability.sinks import Summary
from tests.world.config import run_config

SUMMARY = Summary("completed", None, 1, 1.0, Path("run"))


def config(*loggers: str) -> RunConfig:
    log = {"console": "off", "wandb": "off", "loggers": list(loggers), "project": "ours"}
    bounds = {"shutdown_s": 120}  # MLflow's import takes long beside other work
    return run_config(name="first", student={"model": "student"}, log=log, timeouts=bounds)


def recorded(run_dir: Path, *loggers: str, status: Any = "completed") -> None:
    with RunLog(config(*loggers), run_dir) as log:
        log.log(1, {"loss/total": 2.5, "eval/sort/mean@4": 0.25, "train/grad_norm": math.nan})
        log.log(2, {"loss/total": 1.5})
        log.finish(status)
    assert log.failures == 0, (run_dir / "run.log").read_text()


def resumed(run_dir: Path, logger: str) -> None:
    """Logs step 2 again, and step 3."""
    with RunLog(config(logger), run_dir, before={}) as log:
        for step in (2, 3):
            log.log(step, {"loss/total": 0.5})
        log.finish("completed")
    assert log.failures == 0, (run_dir / "run.log").read_text()


def test_tensorboard_has_the_scalars_of_each_step_once_also_after_a_resume(tmp_path: Path) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    recorded(tmp_path, "tensorboard")
    resumed(tmp_path, "tensorboard")
    found = reader.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    losses = [(one.step, one.value) for one in found.Scalars("loss/total")]
    assert losses == [(1, 2.5), (2, 1.5), (3, 0.5)]
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
from async_opd.observability.logged_run import LoggedRun
from tests.observability.test_loggers import recorded, resumed
one, two = Path(sys.argv[1], "one"), Path(sys.argv[1], "two")
recorded(one, "trackio")
recorded(two, "trackio")
resumed(one, "trackio")
names = {run.name for run in trackio.Api().runs("ours")}
own = {folder: f"first-{LoggedRun.of(folder, 'trackio').id}" for folder in (one, two)}
assert names == set(own.values()), names
from trackio.sqlite_storage import SQLiteStorage
def losses(folder):
    rows = SQLiteStorage.get_logs("ours", own[folder])
    return [(row["step"], row["loss/total"]) for row in rows]
assert losses(one) == [(1, 2.5), (2, 1.5), (3, 0.5)], losses(one)
assert losses(two) == [(1, 2.5), (2, 1.5)], losses(two)
"""


@pytest.mark.slow
def test_trackio_has_one_run_of_a_run_directory_in_its_database(tmp_path: Path) -> None:
    pytest.importorskip("trackio")
    own = {"TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path)}
    command = [sys.executable, "-c", TRACKIO, str(tmp_path / "run")]
    done = subprocess.run(command, env=os.environ | own, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_logger_that_is_not_installed_is_refused_before_the_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(user_code, "find_spec", lambda name: name != "mlflow" or None)
    problems = preflight.preflight(config("tensorboard", "mlflow"), "c.yaml").problems
    (refused,) = [one for one in problems if one.key == "log.loggers"]
    assert refused.message == "mlflow is not installed"
    assert refused.remedy == "pip install 'async-opd[mlflow]'"
    with pytest.raises(ValueError, match="named twice"):
        config("mlflow", "mlflow")


class Failing:
    """A library that fails as configured."""

    def __init__(self, opens: bool = True) -> None:
        if not opens:
            raise ConnectionError("no server")

    def write(self, step: int, metrics: Any) -> None:
        raise ConnectionError(f"step {step} was refused")

    def end(self, summary: Summary) -> None: ...


@pytest.mark.parametrize("opens", [True, False])
def test_a_logger_that_fails_is_reported_and_ends_no_run(
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


class Slow:
    """A library that takes nothing before the test permits it."""

    def __init__(self) -> None:
        self.free = threading.Event()
        self.taken: list[tuple[int, Any]] = []
        self.ends: list[Summary] = []

    def write(self, step: int, metrics: Any) -> None:
        self.free.wait(60)
        self.taken.append((step, metrics))

    def end(self, summary: Summary) -> None:
        self.ends.append(summary)


def test_rows_that_a_slow_logger_does_not_take_are_counted_and_its_run_ends() -> None:
    library = Slow()
    sink = ThreadedSink("mlflow", lambda: library, 60.0)
    for step in range(MAX_ROWS + 3):
        sink.log(step, {})
    library.free.set()
    assert sink.close(SUMMARY) == "mlflow lacks 3 rows: it was behind"
    assert (len(library.taken), library.ends) == (MAX_ROWS, [SUMMARY])


def test_steps_after_a_rewind_come_once(tmp_path: Path) -> None:
    library = Slow()
    library.free.set()
    sink = ThreadedSink("mlflow", lambda: library, 60.0)
    with RunLog(config(), tmp_path, sinks=[sink]) as log:
        for step in (1, 2, 3):
            log.log(step, {"loss": 1.0})
        log.log(2, {"eval/sort/accuracy": 0.5})
        log.rewind({})
        for step in (2, 3, 4):
            log.log(step, {"loss": 2.0})
            log.log(step, {"eval/sort/accuracy": 0.5})
        log.finish("completed")
    rows = [(step, *metrics) for step, metrics in library.taken]
    trained = [step for step, key in rows if key == "loss"]
    evaluated = [step for step, key in rows if key == "eval/sort/accuracy"]
    assert (trained, evaluated) == ([1, 2, 3, 4], [2, 3, 4])


@pytest.mark.slow
def test_an_mlflow_that_refuses_the_config_has_one_run_with_all_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    taken = mlflow.MlflowClient.log_batch

    def log_batch(self: Any, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        if params:
            raise ConnectionError("too long")
        taken(self, run_id, metrics=metrics)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", log_batch)
    with RunLog(config("mlflow"), tmp_path) as log:
        for step in (1, 2, 3):
            log.log(step, {"loss/total": float(step)})
        log.finish("completed")
    assert "mlflow failed: ConnectionError: too long" in (tmp_path / "run.log").read_text()
    client = mlflow.MlflowClient(tracking_uri=(tmp_path / "mlflow").as_uri())
    (run,) = client.search_runs([client.get_experiment_by_name("ours").experiment_id])
    history = client.get_metric_history(run.info.run_id, "loss/total")
    assert [one.step for one in history] == [1, 2, 3]
    assert run.info.status == "FINISHED"
