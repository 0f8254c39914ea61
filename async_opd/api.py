"""The Python API: ``async_opd.distil`` runs what ``async_opd run`` runs.

config ──► prepare: models, data, user code are checked ──► run ──► Summary
                                        callbacks ◄── rows, evaluations, checkpoints, the end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_opd.config.load import load_config
from async_opd.core.errors import ConfigError, Problem
from async_opd.models import torchvision_operators
from async_opd.observability.callbacks import Callback, CallbackSink
from async_opd.observability.sinks import Summary
from async_opd.prepare import prepare

__all__ = ["Callback", "Summary", "distil"]


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
    callback makes it ``failed``. It must be called in the main thread, where no event loop runs,
    below ``if __name__ == "__main__":``, since engines start processes.

    Raises ConfigError for what is wrong with the input, before an engine starts.
    """
    from async_opd.run import run

    torchvision_operators.install()
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
