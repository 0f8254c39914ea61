"""The sinks of ``log.loggers``: TensorBoard, MLflow, Trackio, and those of a user."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import without_secrets
from async_opd.config.sections.log import LOGGERS
from async_opd.config.user_code import LOGGERS as GROUP
from async_opd.config.user_code import user_object
from async_opd.core.nesting import leaves
from async_opd.files.safe_open import make_folder
from async_opd.observability.loggers.logged_run import LoggedRun
from async_opd.observability.loggers.threaded import Recorder, ThreadedSink
from async_opd.observability.sinks import Summary


def logger_sinks(config: RunConfig, run_dir: Path, resumed: bool) -> list[ThreadedSink]:
    """A sink of each logger that the config names; its library is imported by its thread.

    A resumed run goes on in its runs, but for MLflow, where it is another one.
    """
    return [_sink(name, config, run_dir, resumed) for name in config.log.loggers]


def _sink(name: str, config: RunConfig, run_dir: Path, resumed: bool) -> ThreadedSink:
    continued = resumed and name != "mlflow" and name in LOGGERS
    at = LoggedRun.of(run_dir, name) if continued else LoggedRun.new()
    made: dict[str, Callable[[], Recorder]] = {
        "tensorboard": lambda: TensorBoard(run_dir),
        "mlflow": lambda: MLflow(config, run_dir),
        "trackio": lambda: Trackio(config, at.id),
    }

    def noted(at: LoggedRun) -> None:
        if name in LOGGERS:
            at.write(run_dir, name)

    opened = made.get(name, lambda: _of_user(name, config, run_dir))
    return ThreadedSink(name, opened, config.timeouts.shutdown_s, at, noted)


def _of_user(name: str, config: RunConfig, run_dir: Path) -> Recorder:
    """The result of a user's function of the config, as plain data, and the run directory."""
    made: Recorder = user_object(name, GROUP)(
        config.model_dump(mode="json", by_alias=True), run_dir
    )
    return made


class TensorBoard:
    """One event file a process; a resumed run adds another one, in the same folder."""

    def __init__(self, run_dir: Path) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        make_folder(run_dir / "tensorboard")  # raises if it is a link
        self._file: Any = EventFileWriter(str(run_dir / "tensorboard"))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """One event with all values."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary as Values

        values = [Values.Value(tag=key, simple_value=value) for key, value in metrics.items()]
        event = Event(wall_time=time.time(), step=step, summary=Values(value=values))
        self._file.add_event(event)

    def end(self, summary: Summary) -> None:
        """Writes what is left."""
        self._file.close()


MOST, MOST_PARAMS = 1000, 100
"""Metrics and parameters in one call, by MLflow's own limits."""
LONGEST = 500
"""Characters of a parameter's value."""


class MLflow:
    """One MLflow run of the experiment ``log.project``; a resumed run is another one."""

    def __init__(self, config: RunConfig, run_dir: Path) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:  # files need no database, but MLflow 3 wants to be asked for them
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            make_folder(run_dir / "mlflow")  # raises if it is a link
            uri = (run_dir.absolute() / "mlflow").as_uri()
        self._client = MlflowClient(tracking_uri=uri)
        known = self._client.get_experiment_by_name(config.log.project)
        experiment = (
            known.experiment_id if known else self._client.create_experiment(config.log.project)
        )
        self._run = self._client.create_run(experiment, run_name=config.name).info.run_id
        values = leaves(without_secrets(config.model_dump(mode="json", by_alias=True)))
        self._params = [Param(_name(key), str(value)[:LONGEST]) for key, value in values]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the values; ``@`` in a key, which MLflow refuses, becomes ``_at_``.

        The config is logged after the first ones, or when the server takes it: a constructor that
        raised for it would be called again, for another run.
        """
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        rows = [Metric(_name(key), value, now, step) for key, value in metrics.items()]
        for start in range(0, len(rows), MOST):
            self._client.log_batch(self._run, metrics=rows[start : start + MOST])
        while self._params:
            self._client.log_batch(self._run, params=self._params[:MOST_PARAMS])
            del self._params[:MOST_PARAMS]

    def end(self, summary: Summary) -> None:
        """Sets the run's status."""
        ends = {"completed": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
        self._client.set_terminated(self._run, ends[summary.status])


def _name(key: str) -> str:
    """The key with the characters that MLflow accepts."""
    parts = key.replace("@", "_at_")
    return "".join(one if one.isalnum() or one in "_-. /" else "_" for one in parts)


class Trackio:
    """One Trackio run of the project ``log.project``; a resumed run adds to it.

    Trackio knows runs by their names: those of several run directories end with different ids.
    """

    def __init__(self, config: RunConfig, run_id: str) -> None:
        import trackio

        self._run: Any = trackio.init(
            project=config.log.project,
            name=f"{config.name}-{run_id}",
            config=without_secrets(config.model_dump(mode="json", by_alias=True)),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Logs the values."""
        self._run.log(dict(metrics), step=step)

    def end(self, summary: Summary) -> None:
        """Waits until all is in the database."""
        self._run.finish()
