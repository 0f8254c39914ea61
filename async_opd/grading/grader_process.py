"""The process of a grader: it grades one response at a time, until its socket is closed.

``async_opd.grading.grader_pool`` starts it and reads its answers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from async_opd.core.row import Row
from async_opd.grading.graders import load_grader
from async_opd.processes.in_user_process import answered, serve

MAX_CHARACTERS = 2000
"""The longest answer that a grade has."""


def load(name: str) -> Callable[..., None]:
    """The grader, as a function of a Reply, the response and its row."""
    grader = load_grader(name)

    def grade(response: str, row: Row) -> dict[str, Any]:
        found = grader(response, row)
        return {"grade": found, "extracted": found.answer and found.answer[:MAX_CHARACTERS]}

    return lambda reply, response, row: answered(reply, partial(grade, response, row))


if __name__ == "__main__":
    serve(load)
