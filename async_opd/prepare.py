"""A config becomes what a run starts with, once: models and data here, checked, with all defaults.

    config ──fetch──► models and data on this machine ───check───► rows, device, problems
                                                              └──► defaults ──► Prepared

Each command that reads inputs or starts engines takes this way.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from async_opd.checks.endpoint_probes import endpoint_probes
from async_opd.checks.memory_fit import with_defaults
from async_opd.checks.preflight import Inputs, preflight
from async_opd.checks.resources import with_device
from async_opd.checks.run_dir import run_dir_problems
from async_opd.config.run_config import RunConfig
from async_opd.config.user_code import UserCodeError
from async_opd.core.errors import ConfigError, Problem
from async_opd.data.hub import fetched_data
from async_opd.data.mixture import with_steps
from async_opd.data.template_date import with_template_date
from async_opd.models.engine_args import Device
from async_opd.models.hub import localize, named_models, naming_faults, with_cached


@dataclass(frozen=True)
class Prepared:
    """A config with the rows of its data and the device of all pools."""

    config: RunConfig
    inputs: Inputs
    device: Device

    def with_defaults(self) -> Prepared:
        """With all defaults that depend on device, models and memory."""
        return replace(self, config=with_defaults(self.config, self.device))


def prepare(
    config: RunConfig, where: str, *, fetch: bool = True, load: bool = True, resume: bool = False
) -> Prepared:
    """The config with a number of steps and all defaults, its rows and its device.

    Flags as for ``check_inputs``. Servers of teachers are asked: with ``load`` they get their keys
    and prompts with images, else a text of ours. ConfigError with all problems of the config,
    models, data, code, run directory and servers.
    """
    from teachers.endpoint.check import check_endpoints

    found = check_inputs(config, where, fetch=fetch, load=load, resume=resume)
    config, inputs = found.config, found.inputs
    problems = [*inputs.problems, *(loss_problems(config, where) if load else [])]
    local = with_cached(config, [])[0]
    try:
        local = with_steps(local, inputs.train)
    except ConfigError as error:  # too many epochs
        problems += error.problems
    problems += [*run_dir_problems(local, where, resume), *_wandb_problems(config, where)]
    if not problems and not any(named.is_hub_id for named in named_models(local)):
        shown = endpoint_probes(local, inputs) if load else {}
        problems = check_endpoints(local, where, shown, keys=load)
    if problems:
        raise ConfigError(problems)
    return replace(found, config=with_steps(config, inputs.train)).with_defaults()


def check_inputs(
    config: RunConfig,
    where: str,
    *,
    fetch: bool = False,
    load: bool = False,
    resume: bool = False,
    gpus: int | None = None,
) -> Prepared:
    """The config as given, its rows and its device; its problems are in ``inputs.problems``.

    ``fetch``: models and data are downloaded, and stand in the config as paths; a cluster to join
    is asked whether it has GPUs, where ``cluster.device`` does not say. ``load``: code that the
    config names is run, as before a run; else its files are looked for. ``resume``: values that
    depend on the day are as in the run directory. ``gpus`` of this machine; they are counted by
    default. ConfigError for what cannot be downloaded.
    """
    notes: list[str] = []
    if fetch:
        config, notes = with_device(config)
        config = with_template_date(fetched_data(localize(config, where), where), resume)
    inputs = preflight(config, where, gpus, load)
    inputs.problems[:0] = naming_faults(config, where)
    inputs.notes.extend(notes)
    return Prepared(config, inputs, inputs.device)


def _wandb_problems(config: RunConfig, where: str) -> Iterator[Problem]:
    """The problem of ``log.wandb: online`` where wandb has no login."""
    if config.log.wandb == "online":
        from async_opd.observability.wandb_sink import LOGIN, has_login

        if not has_login():
            message = "found online, but there is no login of wandb here"
            yield Problem(where, "log.wandb", message, LOGIN)


def loss_problems(config: RunConfig, where: str) -> list[Problem]:
    """Imports and tries the loss of a user's package; no problem for another loss."""
    if config.loss.kind != "user":
        return []
    from trainer.losses.base import user_divergence

    try:
        user_divergence(config.loss.function, config.loss.options)
    except UserCodeError as error:
        remedy = "docs/extending.md has an example"
        return [Problem(where, "loss.function", str(error), remedy)]
    return []
