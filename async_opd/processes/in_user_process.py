"""The other side of ``user_process.py``: a user's code that answers requests of its starter.

    python -P -m PROGRAM FILE_DESCRIPTOR BYTES

The first request loads the code. Children and forks of it do not have the socket: they could write
answers to it.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from threading import Lock
from typing import Any, Protocol, cast

from async_opd.core.errors import StageError
from async_opd.processes.own_settings import set_parent_death_signal

MAX_CHARACTERS = 2000
"""The longest cause, since some errors quote all of their arguments."""


class Reply(Protocol):
    """Answers one request; any thread may call it."""

    def __call__(self, value: Any = None, cause: str = "", remedy: str = "") -> None: ...


def serve(load: Callable[..., Callable[..., None]]) -> None:
    """Answers requests until the socket is closed.

    ``load`` takes what the first request has, and returns a function that takes a Reply and what
    each further request has.
    """
    set_parent_death_signal()
    _bound_memory(int(sys.argv[2]))
    for stream in (sys.stdout, sys.stderr):  # a pipe, whose lines UserOutput escapes
        cast(TextIOWrapper, stream).reconfigure(
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=partial(_close_in_fork, connection))
    one_line = Lock()

    def answer(request: str, value: Any = None, cause: str = "", remedy: str = "") -> None:
        for printed in (sys.stdout, sys.stderr):  # lines without an end are still buffered
            with suppress(Exception):  # the code may have replaced the streams
                printed.flush()
        line = {"to": request, "value": value, "cause": cause[:MAX_CHARACTERS], "remedy": remedy}
        # halves of surrogate pairs, which a model may write, become question marks
        data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
        with one_line:
            connection.sendall(data)

    with connection, connection.makefile("rb") as asked:
        request, *given = pickle.load(asked)  # the socket of the parent process
        try:
            handle = load(*given)
        except StageError as error:
            return answer(request, cause=error.cause, remedy=error.remedy)
        except (Exception, SystemExit) as error:
            return answer(request, cause=f"{type(error).__name__}: {error}")
        answer(request)
        while True:
            try:
                request, *given = pickle.load(asked)
            except EOFError:
                return None
            handle(partial(answer, request), *given)


def answered(reply: Reply, work: Callable[..., Any], *given: Any) -> None:
    """Replies with the work's value, or with its StageError's cause."""
    try:
        value = work(*given)
    except StageError as error:
        reply(cause=error.cause, remedy=error.remedy)
    else:
        reply(value)


def _bound_memory(nbytes: int) -> None:
    """Limits the data of this process and its children, unless a lower limit is set already."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _close_in_fork(connection: socket.socket) -> None:
    """Closes the socket's file in this process, although objects still refer to the socket."""
    handle = connection.detach()
    if handle >= 0:  # -1 if the parent is a fork itself and has closed it
        os.close(handle)
