"""Checks of a cold start's data: rows, and the answers that are trained on."""

from __future__ import annotations

from collections.abc import Sequence

from async_opd.checks.data import DataChecks, Rows, checked
from async_opd.checks.room import Room, Tally
from async_opd.core.errors import in_words
from async_opd.models.tokenizer import Text

KEY = "cold_start.data"


def cold_start_rows(data: DataChecks) -> list[Rows]:
    """Reads ``cold_start.data``, and checks that there is an answer to each row."""
    settings = data.config.cold_start
    if settings is None:
        return []
    read = data.sources("cold_start")
    data.images("cold_start")
    without = data.parts["cold_start" if settings.data else "train"].unanswered
    if settings.answers == "given" and without.count:
        data.found.add(
            KEY,
            f"{without.count} rows have no {data.config.data.answer!r}, the first is "
            f"{without.first}: there is nothing to train on",
            "add the answers, name their field in data.answer, or set cold_start.answers to "
            "teacher",
        )
    if settings.answers == "teacher":
        for source in sorted(data.parts["cold_start"].routes):
            if data.config.teacher_of(source) is None:
                remedy = "add it to the sources of a teacher"
                data.found.add(KEY, f"no teacher answers data source {source!r}", remedy)
    return read


def given_answers(data: DataChecks, sources: Sequence[Rows], room: Room) -> None:
    """Checks that the answers that a cold start trains on can be tokenized and have embeddings."""
    settings = data.config.cold_start
    if settings is None or settings.answers != "given":
        return
    text, foreign = Text.of(data.config), Tally()
    try:
        for row in (row for rows in sources for row in checked(rows)):
            if row.answer is not None:
                room.add_foreign(row, text.plain(row.answer), foreign)
    except Exception as error:  # a tokenizer can raise anything
        message = f"an answer cannot be tokenized: {in_words(error)}"
        data.found.add(KEY, message, "correct the answer")
    for message, remedy in room.foreign_faults("answers", foreign):
        data.found.add(KEY, message, remedy)
