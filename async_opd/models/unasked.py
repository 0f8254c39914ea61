"""transformers reads the files of a model without a question to the user or a hub.

``trust_remote_code=False`` is not passed to everything that a config.json names, and where nothing
is passed transformers asks on the terminal whether code of the model may run, with a text of its
author. A config.json may also name a model of a hub, which transformers would ask for with the
user's token.

Its log lines quote the files, and are escaped for the terminal.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

from async_opd.core.printable import indented

ASKS = "transformers.dynamic_module_utils"
_alone: ContextVar[bool] = ContextVar("_alone", default=False)


def never_ask() -> None:
    """From now on transformers raises in this process where it would ask whether code may run.

    Nothing is imported. Engines, which multiprocessing starts, have no standard input. Its log
    lines are ``indented``.
    """
    if not isinstance(make := logging.getLogRecordFactory(), _Records):
        logging.setLogRecordFactory(_Records(make))
    if ASKS in sys.modules:
        _set(sys.modules[ASKS])
    elif not any(isinstance(one, _Finder) for one in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


@contextmanager
def without_hub(trusted: bool) -> Iterator[None]:
    """The calling thread sends no request to a hub, unless the code of the model is ``trusted``.

    Other threads go on with theirs, such as those that read rows of a hub.
    """
    from huggingface_hub import constants

    constants.__dict__["is_offline_mode"] = _is_offline
    before = _alone.set(not trusted)
    try:
        yield
    finally:
        _alone.reset(before)


def _is_offline() -> bool:
    """In place of ``huggingface_hub.constants.is_offline_mode``, asked before every request."""
    from huggingface_hub import constants

    return _alone.get() or constants.HF_HUB_OFFLINE


def _set(module: ModuleType) -> None:
    module.__dict__["TIME_OUT_REMOTE_CODE"] = 0  # seconds in which the user may answer


class _Finder(MetaPathFinder):
    """Finds the module that asks, and changes it when it has been executed."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != ASKS:
            return None
        spec = PathFinder.find_spec(name, path)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def changed(module: ModuleType) -> None:
                execute(module)
                _set(module)

            loader.exec_module = changed
        return spec


class _Records:
    """Makes log records, with escaped messages of transformers; a handler is not there yet."""

    def __init__(self, make: Callable[..., logging.LogRecord]) -> None:
        self._make = make

    def __call__(self, *given: Any, **more: Any) -> logging.LogRecord:
        record = self._make(*given, **more)
        if record.name.partition(".")[0] == "transformers":
            with suppress(Exception):  # arguments that do not fit are shown by logging, as repr
                record.msg, record.args = indented(record.getMessage()), None
        return record
