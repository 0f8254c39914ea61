"""A row of a data source, before sampling, and how its fields and answers are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

PromptText = str | list[dict[str, Any]]
"""Plain text, or chat messages."""
AnswerIn = Literal["whole", "####", "boxed"]
"""Where a text has its answer: all of it, after its last ``####``, in its last ``\\boxed{}``."""
BOX = "\\boxed{"


@dataclass(frozen=True)
class Task:
    """A reasoning-gym task with the options it was made with."""

    name: str
    options: dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One entry. ``uid`` is ``<source>:<0-based index>``, for jsonl the index of its line."""

    uid: str
    data_source: str
    prompt: PromptText
    answer: str | None
    fields: dict[str, Any]
    task: Task | None = None
    """The task that generated the row and grades it; None for a row of a file."""


def value_at(fields: Mapping[str, Any], path: str) -> Any:
    """The value of a field, or of one inside of others by dots: ``reward_model.ground_truth``.

    A field whose name has the dots itself comes first. None if there is no such field.
    """
    if path in fields:
        return fields[path]
    outer, dot, inner = path.partition(".")
    inside = fields.get(outer)
    return value_at(inside, inner) if dot and isinstance(inside, Mapping) else None


def answer_in(text: str, place: AnswerIn) -> str | None:
    """The answer that a text gives at a place, without white space around it; None without one."""
    if place == "whole":
        return text.strip()
    if place == "####":
        _, mark, after = text.rpartition("####")
        return after.strip() if mark else None
    start = text.rfind(BOX) + len(BOX)
    depth = 1
    for at in range(start, len(text)) if start >= len(BOX) else ():
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if not depth:
            return text[start:at].strip()
    return None
