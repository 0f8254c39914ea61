"""Checks of code that a config names: of users, of loggers, of what reaches the mirror."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from async_opd.config.registry import TRANSPORTS
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.log import LOGGERS
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.config.user_code import LOGGERS as GROUP
from async_opd.config.user_code import (
    LOSSES,
    UserCodeError,
    find_user_code,
    fits,
    user_object,
    user_transport,
)
from async_opd.config.user_code import TRANSPORTS as TRANSPORT
from async_opd.core.errors import Findings
from async_opd.files.remote import RemoteFile

REMEDY = "put its module on PYTHONPATH; docs/extending.md has examples"


def check_user_code(config: RunConfig, found: Findings, load: bool) -> None:
    """Finds, or imports, code of a user's packages, and notes which servers are not asked.

    ``prepare.loss_problems`` imports the loss, which needs torch.
    """
    for name in config.log.loggers:
        if name in LOGGERS and importlib.util.find_spec(name) is None:
            message = f"{name} is not installed"
            found.add("log.loggers", message, f"pip install 'async-opd[{name}]'")
    named = [("log.loggers", name, GROUP) for name in config.log.loggers if name not in LOGGERS]
    for name, teacher in config.teachers.items() if not load else ():
        if isinstance(teacher, EndpointTeacher) and teacher.api_key_env is not None:
            how = "its servers are not asked: async_opd check --load sends them their key"
            found.notes.append(f"teachers.{name}: {how}")
    if config.loss.kind == "user" and not load:
        named.append(("loss.function", config.loss.function, LOSSES))
    if config.sync.backend not in ("auto", *TRANSPORTS):
        named.append(("sync.backend", config.sync.backend, TRANSPORT))
    for key, name, group in named:
        try:
            if not load:
                find_user_code(name, group)
            elif group == TRANSPORT:
                user_transport(name)
            else:
                fits(user_object(name, group), name, {}, Path())
        except UserCodeError as error:
            found.add(key, str(error), REMEDY)


def check_mirror(config: RunConfig, found: Findings) -> None:
    """Checks that the package is installed which the mirror's URL needs."""
    if config.checkpoint.mirror is not None:
        try:
            RemoteFile(config.checkpoint.mirror).connect()
        except OSError as error:
            found.add("checkpoint.mirror", str(error), "install it, or name another URL")
