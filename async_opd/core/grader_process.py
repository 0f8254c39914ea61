"""The process of a grader: asked over a socket, one response at a time, until nobody asks.

    python -m async_opd.core.grader_process FILE_DESCRIPTOR GRADER

See ``async_opd.core.grading``, which starts it and reads its answers.
"""

from __future__ import annotations

import json
import pickle
import socket
import sys
from io import BufferedRWPair
from typing import Any

from async_opd.core.graders import GradeError, Grader, load_grader
from async_opd.core.orphans import end_with_starter

MOST_LETTERS = 2000
"""Of a cause: some errors quote everything they were given."""


def main() -> None:
    """Tells that the grader is loaded, or why not; then grades."""
    end_with_starter()
    connection = socket.socket(fileno=int(sys.argv[1]))
    with connection, connection.makefile("rwb") as stream:
        try:
            grader = load_grader(sys.argv[2])
        except (Exception, SystemExit) as error:
            _tell(stream, cause=f"{type(error).__name__}: {error}")
            return
        _tell(stream)
        _serve(grader, stream)


def _serve(grader: Grader, stream: BufferedRWPair[Any, Any]) -> None:
    while True:
        try:
            response, row = pickle.load(stream)  # from the process that started this one
        except EOFError:
            return
        try:
            _tell(stream, grade=grader(response, row))
        except GradeError as error:
            _tell(stream, cause=error.cause, remedy=error.remedy)


def _tell(
    stream: BufferedRWPair[Any, Any], grade: float = 0.0, cause: str = "", remedy: str = ""
) -> None:
    answer = {"grade": grade, "cause": cause[:MOST_LETTERS], "remedy": remedy}
    stream.write(json.dumps(answer).encode() + b"\n")
    stream.flush()


if __name__ == "__main__":
    main()
