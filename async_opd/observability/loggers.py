"""The sinks of ``log.loggers``: TensorBoard, MLflow, Trackio, and those of a user.

A library is called by a separate thread, since it may be slow, fail, or hang:

log ──row──► at most MAX_ROWS waiting ──thread──► Recorder (the library)
 ▲                                                    │
 └──────────────── the error of an earlier row ───────┘

A step that the library has and that comes again, after a rewind or a resume, is left out.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import without_secrets
from async_opd.config.sections.log import LOGGERS
from async_opd.config.user_code import LOGGER_GROUP, user_object
from async_opd.core.nesting import leaves
from async_opd.files.safe_open import make_folder
from async_opd.observability.logged_run import LoggedRun, is_evaluation
from async_opd.observability.sinks import LateSink, Summary
from async_opd.processes.background import BackgroundWorker

MAX_ROWS = 1000
"""Rows that may wait for the library."""

Row = tuple[int, dict[str, float]]


class Recorder(Protocol):
    """One run in a logger's library."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes finite values of a step."""

    def end(self, summary: Summary) -> None:
        """Ends the run as the summary says."""


class ThreadedSink(LateSink):
    """Calls ``opened()`` and then its recorder in a thread; errors are raised by a later call."""

    def __init__(
        self,
        name: str,
        opened: Callable[[], Recorder],
        close_s: float,
        known: LoggedRun | None = None,
        noted: Callable[[LoggedRun], None] = lambda at: None,
    ) -> None:
        """``close_s`` bounds ``close``. ``known``: the rows that the library has of this run.

        ``noted`` gets, with each row, the rows that the library then has.
        """
        self._name = name
        self._opened = opened
        self.longest_s = close_s
        self._known = self._at = known or LoggedRun.new()
        self._noted = noted
        self._recorder: Recorder | None = None
        self._dropped = 0
        self._writer: BackgroundWorker[Row | Summary] = BackgroundWorker(
            name, self._do, MAX_ROWS + 1
        )

    @property
    def name(self) -> str:
        """The library's name."""
        return self._name

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the finite values on; counts the row as dropped if too many wait."""
        evaluation = is_evaluation(metrics)
        if self._known.has(step, evaluation=evaluation):
            return
        if self._writer.waiting >= MAX_ROWS:  # the place beyond is the summary's
            self._dropped += 1
            return
        self._at = self._at.after(step, evaluation=evaluation)
        self._noted(self._at)
        finite = {key: value for key, value in metrics.items() if math.isfinite(value)}
        self._writer.put((step, finite))
        self._raise()

    def rewind(self) -> None:
        """Keeps the rows that the library has: ``log`` skips their steps from now on."""
        self._known = self._at

    def close(self, summary: Summary) -> str | None:
        """Ends the run in the library. Returns a message if its record is not complete."""
        self._writer.put(summary)
        if not self._writer.close(self.longest_s):
            waiting = self._writer.waiting
            return f"{self._name} did not take {waiting} rows within {self.longest_s:g} s"
        self._raise()
        return f"{self._name} lacks {self._dropped} rows: it was behind" if self._dropped else None

    def _do(self, items: list[Row | Summary]) -> None:
        for item in items:
            try:
                if self._recorder is None:
                    self._recorder = self._opened()
                if isinstance(item, Summary):
                    self._recorder.end(item)
                else:
                    self._recorder.write(*item)
            except Exception as error:  # of any library
                self._failure = error


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
    made: Recorder = user_object(name, LOGGER_GROUP)(
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
