"""A row of a data source, before sampling, and how its fields and answers are read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

PromptText = str | list[dict[str, Any]]
"""Plain text, or chat messages. Where an image stands, a message's content has the part
``{"type": "image", "image": SHA-256}``."""
AnswerIn = Literal["whole", "####", "boxed"]
"""Where a text has its answer: all of it, after its last ``####``, in its last ``\\boxed{}``."""
BOX = "\\boxed{"
MEDIA = {"image", "image_url", "images", "audio", "audios", "video", "videos"}
"""Fields of rows, and keys of parts of messages, that are more than text."""


@dataclass(frozen=True)
class Task:
    """A reasoning-gym task with the options it was made with."""

    name: str
    options: dict[str, Any]


class Media(NamedTuple):
    """An image by reference: ``sha256`` of its encoded bytes, in hexadecimal digits.

    ``nbytes`` is the number of these bytes; ``width`` and ``height`` are pixels, before a model's
    processor resizes the image.
    """

    sha256: str
    nbytes: int
    width: int
    height: int


@dataclass(frozen=True)
class Row:
    """One entry. ``uid`` is ``<source>:<0-based index>``, for jsonl the index of its line.

    ``images`` are those of the prompt, in order; ``encoded`` are their bytes as the source has
    them, by ``sha256``.
    """

    uid: str
    data_source: str
    prompt: PromptText
    answer: str | None
    fields: dict[str, Any]
    task: Task | None = None
    """The task that generated the row and grades it; None for a row of a file."""
    images: tuple[Media, ...] = ()
    encoded: dict[str, bytes] = field(default_factory=dict)


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


def kind_of(part: Any) -> str:
    """The type of a message's part, which some data sets only say by the key of its value."""
    if not isinstance(part, dict):
        return "text"
    return str(part.get("type") or next((key for key in part if key in MEDIA), "text"))


def kinds_of(prompt: PromptText) -> Iterator[str]:
    """The types of the parts of a prompt's messages; of plain text there are none."""
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content")
        yield from map(kind_of, content if isinstance(content, list) else ())


def images_of(prompt: PromptText) -> Iterator[str]:
    """The SHA-256 of the images that a row's prompt shows, in order."""
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if kind_of(part) in ("image", "image_url"):
                yield str(part.get("image"))
