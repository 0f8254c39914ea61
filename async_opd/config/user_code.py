"""Objects of a user's package: ``module:object``, or the name of an entry point.

Only ``run`` and ``check`` call ``user_object``, which imports the module; ``names_user_code`` reads
the names of entry points, and imports nothing.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

LOSSES, SOURCES = "async_opd.losses", "async_opd.sources"
GRADERS, LOGGERS = "async_opd.graders", "async_opd.loggers"
TRANSPORTS = "async_opd.transports"
"""The groups of entry points; one of a transport names a module."""


class UserCodeError(Exception):
    """A user's object cannot be imported or called; the text says why."""


def names_user_code(name: str, group: str) -> bool:
    """Whether the name is ``module:object``, or that of an entry point of the group."""
    return ":" in name or bool(_entry_points(name, group))


def user_object(name: str, group: str) -> Callable[..., Any]:
    """Imports what the name means. UserCodeError for what cannot be imported, or be called."""
    try:
        if ":" in name:
            found = resolve_name(name)
        else:
            installed = _entry_points(name, group)
            if len(installed) != 1:
                known = ", ".join(sorted(entry_points(group=group).names)) or "none"
                count = "several packages have" if installed else "no installed package has"
                raise UserCodeError(
                    f"{count} an entry point {name!r} of {group} (installed: {known}); "
                    "write module:object"
                )
            found = installed[0].load()
    except UserCodeError:
        raise
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise UserCodeError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UserCodeError(f"{name} is {type(found).__name__}, which cannot be called")
    called: Callable[..., Any] = found
    return called


def user_transport(name: str) -> ModuleType:
    """Imports ``module:`` or an entry point. UserCodeError for what is no transport's module."""
    place = name.removesuffix(":")
    try:
        points = _entry_points(name, TRANSPORTS)
        found = points[0].load() if points else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise UserCodeError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    lacks = [part for part in ("DEVICES", "sender", "receiver") if not hasattr(found, part)]
    if lacks or not isinstance(found, ModuleType):
        raise UserCodeError(f"{name} is no module with {', '.join(lacks) or 'both ends'}")
    return found


def fits(function: Callable[..., Any], name: str, /, *given: Any, **options: Any) -> None:
    """UserCodeError if the function does not take these arguments."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of C code, which is known to be callable only
        return
    try:
        signature.bind(*given, **options)
    except TypeError as error:
        raise UserCodeError(f"{name}{signature} does not fit: {error}") from error


def _entry_points(name: str, group: str) -> list[EntryPoint]:
    return list(entry_points(group=group, name=name))
