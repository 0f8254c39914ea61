"""The sinks of ``log.loggers``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.log import LOGGERS
from async_opd.config.user_code import LOGGERS as GROUP
from async_opd.config.user_code import user_object
from async_opd.observability.loggers.logged_run import LoggedRun
from async_opd.observability.loggers.mlflow import MLflow
from async_opd.observability.loggers.tensorboard import TensorBoard
from async_opd.observability.loggers.threaded import Recorder, ThreadedSink
from async_opd.observability.loggers.trackio import Trackio


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
