"""The Python API: ``async_opd.distil`` runs what ``async_opd run`` runs.

config ──► prepare: models, data, user code are checked ──► run ──► Summary
                                        callbacks ◄── rows, evaluations, checkpoints, the end
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_opd.config.load import load_config
from async_opd.core.errors import ConfigError, Problem
from async_opd.models import torchvision_operators, unasked
from async_opd.observability.logged_run import is_evaluation
from async_opd.observability.sinks import LateSink, Summary
from async_opd.prepare import prepare

__all__ = ["Callback", "Summary", "distil"]


class Callback:
    """Methods that a run calls on its event loop: a slow one delays the run.

    In a notebook this loop is in another thread than the cell's.

    An error of a method ends the run as failed, with the error as its cause. Methods that are not
    overridden do nothing.
    """

    def on_row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called with each row of ``metrics.jsonl``, evaluations among them."""

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        """Called after ``on_row`` with the rows of evaluations (docs/evaluation.md)."""

    def on_checkpoint(self, step: int, folder: Path) -> None:
        """Called when a checkpoint is complete. Its error ends the run at the next row."""

    def on_end(self, summary: Summary) -> None:
        """Called once, when the run has ended and ``summary.json`` is written."""


class CallbackSink(LateSink):
    """Calls all callbacks; their errors end the run. ``summary``: how it ended, once it has.

    ``error``: what ``close`` raised.
    """

    required = True
    name = "callback"

    def __init__(self, callbacks: Sequence[Callback]) -> None:
        self._callbacks = callbacks
        self.summary: Summary | None = None
        self.error: str | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Raises what a callback raises, or has raised for a checkpoint."""
        self._raise()
        self._each(lambda one: one.on_row(step, metrics))
        if is_evaluation(metrics):
            self._each(lambda one: one.on_evaluation(step, metrics))

    def checkpoint(self, step: int, folder: Path) -> None:
        """Keeps the error of a callback: the task that writes checkpoints ends no run."""
        try:
            self._each(lambda one: one.on_checkpoint(step, folder))
        except Exception as error:
            self._failure = error

    def close(self, summary: Summary) -> str | None:
        """Calls all callbacks, and raises the first error: that of a checkpoint, or of one here."""
        self.summary = summary
        for callback in self._callbacks:
            try:
                callback.on_end(summary)
            except Exception as error:
                self._failure = self._failure or error
        if self._failure is not None:
            self.error = f"{type(self._failure).__name__}: {self._failure}"
        self._raise()
        return None

    def _each(self, call: Callable[[Callback], None]) -> None:
        for callback in self._callbacks:
            call(callback)


def distil(
    config: str | Path | Mapping[str, Any],
    *,
    callbacks: Sequence[Callback] = (),
    overrides: Sequence[str] = (),
    resume: bool = False,
) -> Summary:
    """Trains the student of a config to the end, and returns how the run ended.

    ``config`` is a YAML file, or its content as a mapping, whose relative paths are relative to the
    working directory; ``overrides`` are ``key=value``, as on the command line, and ``resume``
    continues the run in ``run_dir``. ``callbacks`` are called in their order. ``Summary.status`` is
    ``failed`` or ``interrupted``, with ``error``, for a run that has not completed: an error of a
    callback makes it ``failed``. A script calls it below ``if __name__ == "__main__":``, since
    engines start processes. In a notebook, where an event loop runs already, the run has another
    thread, and interrupting the cell ends it with a checkpoint, as Ctrl-C does elsewhere.

    Raises ConfigError for what is wrong with the input, before an engine starts.
    """
    from async_opd.run import run

    torchvision_operators.install()
    unasked.never_ask()
    where = "the config" if isinstance(config, Mapping) else str(config)
    loaded = load_config(config, overrides)
    if resume and loaded.run_dir is None:
        remedy = "set run_dir"
        raise ConfigError([Problem(where, "run_dir", "resume needs the run's directory", remedy)])
    ready = prepare(loaded, where, resume=resume)
    ended = CallbackSink(callbacks)
    code = run(ready, resume, viewers=[ended])
    if ended.summary is None:
        cause = f"{ready.config.run_dir} is completed already"
        remedy = "choose another run_dir, or do not resume"
        raise ConfigError([Problem(where, "run_dir", cause, remedy)])
    if code and ended.summary.status == "completed":  # closing the log has failed
        return replace(ended.summary, status="failed", error=ended.error or ended.summary.error)
    return ended.summary
