"""The Python API: ``async_opd.distil`` runs what ``async_opd run`` runs.

config ──► prepared: models, data, user code are checked ──► run ──► Summary
                                        callbacks ◄── rows, evaluations, checkpoints, the end
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from async_opd.checks.images.shown import shown_to_servers
from async_opd.checks.memory_fit import with_defaults
from async_opd.checks.preflight import Inputs, preflight
from async_opd.checks.resources import resolve_device, with_device
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError, Problem
from async_opd.data.hub import fetched_data
from async_opd.data.mixture import with_steps
from async_opd.data.template_date import with_template_date
from async_opd.models import torchvision_operators, unasked
from async_opd.models.hub import localize, naming_faults
from async_opd.observability.callbacks import Callback, CallbackSink
from async_opd.observability.sinks import Summary

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
    unasked.never_ask()
    where = "the config" if isinstance(config, Mapping) else str(config)
    loaded = load_config(config, overrides)
    if resume and loaded.run_dir is None:
        remedy = "set run_dir"
        raise ConfigError([Problem(where, "run_dir", "resume needs the run's directory", remedy)])
    ready, inputs = prepared(loaded, where, resume)
    ended = CallbackSink(callbacks)
    code = run(ready, inputs, resume, viewers=[ended])
    if ended.summary is None:
        cause = f"{ready.run_dir} is completed already"
        remedy = "choose another run_dir, or do not resume"
        raise ConfigError([Problem(where, "run_dir", cause, remedy)])
    if code and ended.summary.status == "completed":  # closing the log has failed
        return replace(ended.summary, status="failed", error=ended.error or ended.summary.error)
    return ended.summary


def prepared(config: RunConfig, where: str, resume: bool = False) -> tuple[RunConfig, Inputs]:
    """The config with local models and data and all defaults, and its rows. ConfigError.

    With ``resume`` what depends on the day is as in the run directory. A cluster to join is asked
    whether it has GPUs, where ``cluster.device`` does not say.
    """
    config, noted = with_device(config)
    config = with_template_date(fetched_data(localize(config, where), where), resume)
    config, inputs = checked(config, where, load=True)
    inputs.notes.extend(noted)
    return with_defaults(config, resolve_device(config)), inputs


def checked(config: RunConfig, where: str, load: bool) -> tuple[RunConfig, Inputs]:
    """The config with its number of steps, and its rows; nothing is downloaded.

    ``load``: code that the config names is run, as before a run, and its servers get their keys and
    prompts with images; else files of code are looked for, and servers get a text of ours.
    ConfigError with all problems of the config, models, data and endpoints.
    """
    from teachers.endpoint.check import check_endpoints

    inputs = preflight(config, where, load=load)
    problems = naming_faults(config, where) + inputs.problems
    problems += user_loss_problems(config, where) if load else []
    shown = shown_to_servers(config, inputs) if load and not problems else {}
    problems = problems or check_endpoints(config, where, shown, keys=load)
    if problems:
        raise ConfigError(problems)
    return with_steps(config, inputs.train), inputs


def user_loss_problems(config: RunConfig, where: str) -> list[Problem]:
    """Imports and tries the loss of a user's package; no problem for another loss."""
    if config.loss.kind != "user":
        return []
    from async_opd.config.user_code import UserCodeError
    from trainer.losses.base import user_divergence

    try:
        user_divergence(config.loss.function, config.loss.options)
    except UserCodeError as error:
        remedy = "docs/extending.md has an example"
        return [Problem(where, "loss.function", str(error), remedy)]
    return []
