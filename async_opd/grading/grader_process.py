"""The process of a grader: it grades one response at a time, until its socket is closed.

    python -P -m async_opd.grading.grader_process FILE_DESCRIPTOR GRADER BYTES

``async_opd.grading.grader_pool`` starts it and reads its answers. Children and forks of the grader
do not have the socket: they could write grades to it.
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
from io import BufferedRWPair, TextIOWrapper
from typing import Any, cast

from async_opd.core.row import Row
from async_opd.grading.graders import Grade, GradeError, load_grader
from async_opd.processes.own_settings import set_parent_death_signal

LOADED = "loaded"
"""The request that the first answer is to."""
NO_GRADE = Grade(0.0)
MAX_CHARACTERS = 2000
"""The longest cause, since some errors quote all of their arguments; and the longest answer."""


def main() -> None:
    """Answers that the grader is loaded, or why it is not; then grades."""
    set_parent_death_signal()
    _bound_memory(int(sys.argv[3]))
    for stream in (sys.stdout, sys.stderr):  # a pipe, whose lines GraderOutput escapes
        cast(TextIOWrapper, stream).reconfigure(
            encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
    connection = socket.socket(fileno=int(sys.argv[1]))
    connection.set_inheritable(False)
    os.register_at_fork(after_in_child=partial(_close_in_fork, connection))
    with connection, connection.makefile("rwb") as asked:
        try:
            grader = load_grader(sys.argv[2])
        except (Exception, SystemExit) as error:
            _answer(asked, LOADED, cause=f"{type(error).__name__}: {error}")
            return
        _answer(asked, LOADED)
        _serve(grader, asked)


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


def _serve(grader: Callable[[str, Row], Grade], stream: BufferedRWPair[Any, Any]) -> None:
    while True:
        try:
            request, response, row = pickle.load(stream)  # the socket of the parent process
        except EOFError:
            return
        try:
            _answer(stream, request, grade=grader(response, row))
        except GradeError as error:
            _answer(stream, request, cause=error.cause, remedy=error.remedy)


def _answer(
    stream: BufferedRWPair[Any, Any],
    request: str,
    grade: Grade = NO_GRADE,
    cause: str = "",
    remedy: str = "",
) -> None:
    answer = {"to": request, "grade": grade, "cause": cause[:MAX_CHARACTERS], "remedy": remedy}
    answer["extracted"] = grade.answer and grade.answer[:MAX_CHARACTERS]
    for printed in (sys.stdout, sys.stderr):  # lines without an end are still buffered
        with suppress(Exception):  # the grader may have replaced the streams
            printed.flush()
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
