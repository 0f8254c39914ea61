"""The sinks of ``log.loggers``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from async_opd.config.run_config import RunConfig
from async_opd.observability.loggers.mlflow import MLflow
from async_opd.observability.loggers.tensorboard import TensorBoard
from async_opd.observability.loggers.threaded import Recorder, ThreadedSink
from async_opd.observability.loggers.trackio import Trackio


def logger_sinks(config: RunConfig, run_dir: Path) -> list[ThreadedSink]:
    """A sink of each logger that the config names; its library is imported by its thread."""
    made: dict[str, Callable[[], Recorder]] = {
        "tensorboard": lambda: TensorBoard(run_dir),
        "mlflow": lambda: MLflow(config, run_dir),
        "trackio": lambda: Trackio(config),
    }
    bound_s = config.timeouts.shutdown_s
    return [ThreadedSink(name, made[name], bound_s) for name in config.log.loggers]
