"""Checks of code that a config names, of a user or a package: graders, losses, transports, …"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from async_opd.config.registry import TRANSPORTS
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.environment import ENVIRONMENT
from async_opd.config.sections.log import LOGGERS
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.config.user_code import (
    ENVIRONMENT_GROUP,
    LOGGER_GROUP,
    LOSS_GROUP,
    TRANSPORT_GROUP,
    UserCodeError,
    find_user_code,
    fits,
    user_object,
    user_transport,
)
from async_opd.core.errors import Findings, in_words
from async_opd.core.row import Row
from async_opd.environments.kinds import EXTRA
from async_opd.environments.pool import EnvironmentSpec, environment_fault
from async_opd.files.remote import RemoteFile
from async_opd.grading.grader_pool import GraderSpec, loading_fault
from async_opd.grading.graders import KNOWN, find_grader, is_function, load_grader
from async_opd.waiting.own_loop import run_to_end

REMEDY = "put its module on PYTHONPATH; docs/extending.md has examples"


def check_user_code(config: RunConfig, found: Findings, load: bool) -> None:
    """Finds, or imports, code of a user's packages, and notes which servers are not asked.

    ``prepare.loss_problems`` imports the loss, which needs torch.
    """
    for name in config.log.loggers:
        if name in LOGGERS and find_spec(name) is None:
            message = f"{name} is not installed"
            found.add("log.loggers", message, f"pip install 'async-opd[{name}]'")
    named = [
        ("log.loggers", name, LOGGER_GROUP) for name in config.log.loggers if name not in LOGGERS
    ]
    for name, teacher in config.teachers.items() if not load else ():
        if isinstance(teacher, EndpointTeacher) and teacher.api_key_env is not None:
            how = "its servers are not asked: async_opd check --load sends them their key"
            found.notes.append(f"teachers.{name}: {how}")
    if config.loss.kind == "user" and not load:
        named.append(("loss.function", config.loss.function, LOSS_GROUP))
    if config.sync.backend not in ("auto", *TRANSPORTS):
        named.append(("sync.backend", config.sync.backend, TRANSPORT_GROUP))
    for key, name, group in named:
        try:
            if not load:
                find_user_code(name, group)
            elif group == TRANSPORT_GROUP:
                user_transport(name)
            else:
                fits(user_object(name, group), name, {}, Path())
        except UserCodeError as error:
            found.add(key, str(error), REMEDY)


def check_grader(config: RunConfig, found: Findings, load: bool, key: str, name: str) -> None:
    """Checks that a grader can be loaded: a user's in a separate process, as in a run."""
    fault = ""
    try:
        if not is_function(name):
            load_grader(name)
        elif load:
            fault = run_to_end(loading_fault(GraderSpec.of(config, name)))
        else:
            find_grader(name)
    except UserCodeError as error:
        fault = str(error)
    except (ImportError, ValueError) as error:  # of a built-in one
        fault = f"{name} cannot be loaded: {in_words(error)}"
    if fault:
        found.add(key, fault, f"{KNOWN}, or module:function on PYTHONPATH")


def check_environment(config: RunConfig, found: Findings, load: bool, train: Iterable[Row]) -> None:
    """Checks that an episode begins with the first training row; without ``load`` only its code."""
    given = config.environment
    if given is None:
        return
    if given.kind == "gymnasium" and find_spec("gymnasium") is None:
        found.add("environment.kind", "the package gymnasium is not installed", EXTRA)
    elif load:
        graders = [config.eval.grader] if config.data.eval else []
        graders += [config.reward.grader] if config.reward else []
        spec, rewards = EnvironmentSpec.of(config), ENVIRONMENT in graders
        fault = run_to_end(environment_fault(spec, next(iter(train), None), rewards))
        if fault is not None:
            found.add("environment", fault.cause, fault.remedy)
    elif given.kind == "gymnasium":  # no statement of its module names what that registers
        for module in (name.rpartition(":")[0] for name in given.code):
            if find_spec(module.partition(".")[0]) is None:
                cause = f"the module {module} does not exist"
                found.add("environment.id", cause, "put it on PYTHONPATH")
    else:
        for name in given.code:
            try:
                find_user_code(name, ENVIRONMENT_GROUP)
            except UserCodeError as error:
                found.add("environment", str(error), "put its module on PYTHONPATH")


def check_mirror(config: RunConfig, found: Findings) -> None:
    """Checks that the package is installed which the mirror's URL needs."""
    if config.checkpoint.mirror is not None:
        try:
            RemoteFile(config.checkpoint.mirror).connect()
        except OSError as error:
            found.add("checkpoint.mirror", str(error), "install it, or name another URL")
