"""From the fields of an entry to a row, by the names that the config gives."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field

from async_opd.config.sections.data import PromptSource
from async_opd.config.sections.section import Name
from async_opd.core.errors import RowFault, SourceError, in_words
from async_opd.core.nesting import MAX_DEPTH
from async_opd.core.row import MEDIA, AnswerIn, Row, answer_in, kinds_of, value_at
from async_opd.data.images import RowImages

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig

MAX_ROW_BYTES = 16 << 20
"""Letters and bytes of a row, images of it included."""
MAX_ROUTE = 1000
"""Letters of a row's data source: all that occur are kept, and are names of metrics."""
MAX_NAMED = 12
PROMPTS = (
    *("prompt", "question", "problem", "instruction", "query", "input", "text"),
    *("messages", "conversations", "conversation"),
)
"""Names of prompts' fields in other data sets, the likeliest first."""


class RowSource(PromptSource):
    """A source of entries with fields; its own names of fields come before those of ``data``."""

    prompt: Name | None = Field(default=None, min_length=1)
    """Field with the prompt, in place of ``data.prompt``."""
    answer: Name | None = Field(default=None, min_length=1)
    """Field with the reference answer, in place of ``data.answer``."""
    answer_in: AnswerIn | None = None
    """Where the answer is in that field, in place of ``data.answer_in``."""
    data_source: Name | None = Field(default=None, min_length=1)
    """The data source of all rows, in place of the field ``data.route_by``."""
    images: Name | None = Field(default=None, min_length=1)
    """Field with the images, in place of ``data.images``."""
    image_folder: str | None = Field(default=None, min_length=1)
    """Folder of images that rows name by path, by default that of the file with the rows. Nothing
    outside of it is opened."""

    def row(
        self, fields: dict[str, Any], uid: str, data: DataConfig, folder: Path | None = None
    ) -> Row:
        """The row of an entry, whose images may lie in ``folder``.

        ValueError if it is too large, lacks a prompt or its answer, or has an image that cannot be
        read, or anything else but text. ImportError if it has an image, and Pillow is missing.
        """
        excess = _excess(fields)
        if excess is not None:
            raise ValueError(excess)
        name = self.prompt or data.prompt
        needed = [name] + [data.route_by] * (self.data_source is None)
        if lacking := [one for one in needed if value_at(fields, one) is None]:
            message = f"has no field {' or '.join(map(repr, lacking))}; it has {_names(fields)}"
            remedies = [self._other_field(one == name, fields) for one in lacking]
            answer = self.answer or data.answer
            if value_at(fields, answer) is None:
                remedies.append(f"graded rows need data.answer, too: there is no {answer!r}")
            raise RowFault(message, "; ".join(remedies))
        for one in needed:
            if value_at(fields, one) in ("", []):
                raise ValueError(f"has an empty field {one!r}")
        prompt = value_at(fields, name)
        chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
        if not chat and not isinstance(prompt, str):
            kind = type(prompt).__name__
            raise ValueError(f"{name!r} is {kind}, neither text nor chat messages")
        route = self.data_source or str(value_at(fields, data.route_by))
        if len(route) > MAX_ROUTE:
            message = f"{data.route_by!r} has {len(route)} letters, of at most {MAX_ROUTE}"
            raise ValueError(f"{message}: each is kept in memory")
        row = Row(
            uid=uid,
            data_source=route,
            prompt=prompt,
            answer=self._answer(fields, data),
            fields=fields,
        )
        images = RowImages(
            self.images or data.images,
            name,
            data.image_placeholder,
            folder if self.image_folder is None else Path(self.image_folder),
            data.max_image_pixels,
            data.max_images,
            MAX_ROW_BYTES,
        )
        row = images.read(row)
        unread = _unread(row, images.field)
        if unread is not None:
            hint = "; name the field with images in data.images" * unread.startswith("image")
            raise ValueError(f"has {unread!r}, and only text and images are read{hint}")
        return row

    def _other_field(self, is_prompt: bool, fields: dict[str, Any]) -> str:
        """The remedy where rows lack the field of the prompt, or that of the data source."""
        if not is_prompt:
            return (
                "give all rows of the source one (data.train: {path: …, data_source: NAME}), or "
                "set data.route_by to the field that has it"
            )
        key = "data.prompt" if self.prompt is None else "prompt of the source"
        near = next((one for one in PROMPTS if one in fields), "the field that has it")
        return f"set {key}: {near}"

    def _answer(self, fields: dict[str, Any], data: DataConfig) -> str | None:
        name, place = self.answer or data.answer, self.answer_in or data.answer_in
        value = value_at(fields, name)
        if value is None or place == "whole":
            return None if value is None else str(value)
        found = answer_in(str(value), place)
        if found is None:
            mark = "####" if place == "####" else "\\boxed{…}"
            message = f"{name!r} has no {mark}, in which data.answer_in expects the answer"
            raise RowFault(message, "set data.answer_in: whole, or remove the row")
        return found


def row_error(label: str, error: ValueError, row: int) -> SourceError:
    """The error of a row (from 1), with the remedy if it is a ``RowFault``."""
    return SourceError(label, in_words(error), row, getattr(error, "remedy", ""))


def too_large() -> str:
    """The fault of an entry of more than ``MAX_ROW_BYTES``."""
    return f"is too large: more than {MAX_ROW_BYTES >> 20} MiB"


def _excess(fields: dict[str, Any]) -> str | None:
    """The part of a row that is too large: a row is pickled, rendered and graded whole."""
    size, level, depth = 0, [fields], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return f"is nested too deeply: more than {MAX_DEPTH} values inside of each other"
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                inner += value
            size += len(value) if isinstance(value, str | bytes) else 1
        if size > MAX_ROW_BYTES:
            return too_large()
        level = inner
    return None


def _unread(row: Row, images: str) -> str | None:
    """The name of a field, or the type of a message's part, that is neither text nor an image."""
    for name in sorted(MEDIA & row.fields.keys() - {images}):
        if row.fields[name] not in (None, "", [], {}):
            return name
    return next((kind for kind in kinds_of(row.prompt) if kind not in ("text", "image")), None)


def _names(fields: dict[str, Any]) -> str:
    """Some of the fields' names."""
    names = [repr(str(name)[:40]) for name in list(fields)[:MAX_NAMED]]
    return ", ".join([*names, "…"] if len(fields) > MAX_NAMED else names)
