"""A row of a data source, before sampling."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

PromptText = str | list[dict[str, Any]]
"""Plain text, or chat messages."""


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
