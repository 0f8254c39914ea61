"""The process of a grader: asked over a socket, one response at a time, until nobody asks.

    python -P -m async_opd.grading.grader_process FILE_DESCRIPTOR GRADER BYTES

See ``async_opd.grading.grader_pool``, which starts it and reads its answers. What a grader starts,
or forks off, does not have the socket: it could grade itself.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import socket
import sys
from contextlib import suppress
from functools import partial
from io import BufferedRWPair, TextIOWrapper
from typing import Any, cast

from async_opd.grading.graders import GradeError, Grader, load_grader
from async_opd.processes.parent_death import set_parent_death_signal

LOADED = "loaded"
"""The request that the first answer is to."""
MAX_CHARACTERS = 2000
"""Of a cause: some errors quote everything they were given."""


def main() -> None:
    """Tells that the grader is loaded, or why not; then grades."""
    set_parent_death_signal()
    _bound_memory(int(sys.argv[3]))
    for stream in (sys.stdout, sys.stderr):  # a pipe, whose lines are quoted where it ends
        cast(TextIOWrapper, stream).reconfigure(
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=partial(_let_go, connection))
    with connection, connection.makefile("rwb") as asked:
        try:
            grader = load_grader(sys.argv[2])
        except (Exception, SystemExit) as error:
            _tell(asked, LOADED, cause=f"{type(error).__name__}: {error}")
            return
        _tell(asked, LOADED)
        _serve(grader, asked)


def _bound_memory(nbytes: int) -> None:
    """This process, and what it starts, has no more data than that, or than it could have."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    most = nbytes if hard == resource.RLIM_INFINITY else min(nbytes, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, most))


def _let_go(connection: socket.socket) -> None:
    """Its file is closed in this process, whoever still refers to it."""
    handle = connection.detach()
    if handle >= 0:  # not yet in a process of which this one is a fork
        os.close(handle)


def _serve(grader: Grader, stream: BufferedRWPair[Any, Any]) -> None:
    while True:
        try:
            request, response, row = pickle.load(stream)  # from who started this process
        except EOFError:
            return
        try:
            _tell(stream, request, grade=grader(response, row))
        except GradeError as error:
            _tell(stream, request, cause=error.cause, remedy=error.remedy)


def _tell(
    stream: BufferedRWPair[Any, Any],
    request: str,
    grade: float = 0.0,
    cause: str = "",
    remedy: str = "",
) -> None:
    answer = {"to": request, "grade": grade, "cause": cause[:MAX_CHARACTERS], "remedy": remedy}
    for printed in (sys.stdout, sys.stderr):  # a line that has no end yet
        with suppress(Exception):  # a grader may have put its own there
            printed.flush()
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
