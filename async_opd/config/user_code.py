"""Objects of a user's package: ``module:object``, ``file.py:object``, or an entry point.

    check, doctor, init ──find_user_code──► the module's file is there and binds the name: not run
    run, eval, probe, check --load ──user_object──► the object, after the import of its module

Loading a config reads the names of entry points only (``names_user_code``).
"""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.machinery import PathFinder
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

LOSS_GROUP, SOURCE_GROUP = "async_opd.losses", "async_opd.sources"
GRADER_GROUP, LOGGER_GROUP = "async_opd.graders", "async_opd.loggers"
TRANSPORT_GROUP, ENVIRONMENT_GROUP = "async_opd.transports", "async_opd.environments"
"""The groups of entry points; one of a transport names a module."""
ENDS = ("DEVICES", "sender", "receiver")
"""The names that the module of a transport has."""
ONLY_ENGINES_OFFLINE = "ASYNC_OPD_ONLY_ENGINES_OFFLINE"
"""Set where ``HF_HUB_OFFLINE`` is for an engine, and not for a user's code in a separate process.
"""
DYNAMIC = ("globals", "vars", "setattr", "exec")
"""Functions by which a module binds names that its statements do not show."""
MAX_PARSED_BYTES = 1 << 18
"""A larger module is not parsed: up to 1000 times its size of memory, and seconds."""


class UserCodeError(Exception):
    """A user's object cannot be imported or called; the text says why."""


def names_user_code(name: str, group: str) -> bool:
    """Whether the name is ``module:object``, or that of an entry point of the group."""
    return ":" in name or bool(_entry_points(name, group))


def user_object(name: str, group: str) -> Callable[..., Any]:
    """Imports what the name means. UserCodeError for what cannot be imported, or be called."""
    place, _, path = name.rpartition(":")
    try:
        if place.endswith(".py"):
            found = getattr(module_in(Path(place)), path)
        else:
            found = resolve_name(name) if place else _entry_point(name, group).load()
    except UserCodeError:
        raise
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise UserCodeError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    if not callable(found):
        raise UserCodeError(f"{name} is {type(found).__name__}, which cannot be called")
    called: Callable[..., Any] = found
    return called


def module_in(file: Path) -> ModuleType:
    """Imports a file that is in no package. ImportError, and what the file raises."""
    spec = spec_from_file_location(f"file_{str(file).replace('.', '_')}", file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} cannot be imported")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickle look a class's module up there
    spec.loader.exec_module(module)
    return module


def user_transport(name: str) -> ModuleType:
    """Imports ``module:`` or an entry point. UserCodeError if it is not a transport's module."""
    place = name.removesuffix(":")
    try:
        points = _entry_points(name, TRANSPORT_GROUP)
        found = points[0].load() if points else importlib.import_module(place)
    except (Exception, SystemExit) as error:  # a user's module can raise anything
        raise UserCodeError(f"{name} cannot be loaded: {type(error).__name__}: {error}") from error
    lacks = [part for part in ENDS if not hasattr(found, part)]
    if lacks or not isinstance(found, ModuleType):
        raise UserCodeError(f"{name} is not a module with {', '.join(lacks) or 'both ends'}")
    return found


def find_user_code(name: str, group: str) -> None:
    """UserCodeError unless the module that the name means is there and binds what it names.

    The module's file is parsed; neither it nor a package above it is imported.
    """
    module, _, path = name.rpartition(":")
    if ":" not in name:
        point = _entry_point(name, group)
        module, path = point.module, point.attr
    bound = ENDS if group == TRANSPORT_GROUP else (path.partition(".")[0],)
    try:
        file = Path(module) if module.endswith(".py") else _file_of(module)
    except (ImportError, ValueError, AttributeError) as error:
        raise UserCodeError(f"{name} cannot be found: {error}") from error
    if file is not None:
        find_in_file(file, bound, name)


def find_in_file(file: Path, bound: Sequence[str], name: str) -> None:
    """UserCodeError unless the Python file, which ``name`` means, binds these names."""
    try:
        if not file.is_file():
            raise OSError(f"{file} does not exist, or is not a regular file")
        if file.stat().st_size > MAX_PARSED_BYTES:
            return
        with warnings.catch_warnings(action="ignore"):  # they quote the file
            names = set(_bound(ast.parse(file.read_bytes(), file)))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise UserCodeError(f"{name} cannot be found: {type(error).__name__}: {error}") from error
    lacks = [one for one in bound if one not in names]
    if lacks and not names & {"*", "__getattr__"}:
        raise UserCodeError(f"{name} cannot be found: {file} has no {', '.join(lacks)}")


def _file_of(module: str) -> Path | None:
    """The source of a module. ImportError if it does not exist.

    None where no file of Python says what it binds: for extensions and archives.
    """
    places, origin = None, ""
    for part in module.split("."):
        # find_spec would import the packages above a dotted name
        found = find_spec(part) if places is None else PathFinder.find_spec(part, places)
        if found is None:
            raise ImportError(f"the module {module} does not exist")
        places, origin = list(found.submodule_search_locations or ()), str(found.origin)
    return file if (file := Path(origin)).suffix == ".py" and file.is_file() else None


def _bound(tree: ast.Module) -> Iterator[str]:
    """Names that statements of a module bind, at any depth; ``*`` if it may bind any others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name):
            yield "*" if node.id in DYNAMIC else node.id if isinstance(node.ctx, ast.Store) else ""
        elif isinstance(node, ast.ImportFrom) and node.level and node.module:
            yield node.module.partition(".")[0]  # importing a submodule binds it in its package
        elif isinstance(node, ast.alias):
            yield node.asname or node.name.partition(".")[0]


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


def _entry_point(name: str, group: str) -> EntryPoint:
    """The only entry point of this name. UserCodeError."""
    installed = _entry_points(name, group)
    if len(installed) != 1:
        known = ", ".join(sorted(entry_points(group=group).names)) or "none"
        count = "several packages have" if installed else "no installed package has"
        cause = f"{count} an entry point {name!r} of {group} (installed: {known})"
        raise UserCodeError(f"{cause}; write module:object")
    return installed[0]


def _entry_points(name: str, group: str) -> list[EntryPoint]:
    return list(entry_points(group=group, name=name))
