"""The sinks of ``log.loggers``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from async_opd.config.run_config import RunConfig
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
    at = LoggedRun.of(run_dir, name) if resumed and name != "mlflow" else LoggedRun.new()
    made: dict[str, Callable[[], Recorder]] = {
        "tensorboard": lambda: TensorBoard(run_dir),
        "mlflow": lambda: MLflow(config, run_dir),
        "trackio": lambda: Trackio(config, at.id),
    }

    def noted(at: LoggedRun) -> None:
        at.write(run_dir, name)

    return ThreadedSink(name, made[name], config.timeouts.shutdown_s, at, noted)
