"""An endless, deterministic stream of prompts from several sources, mixed by weight.

    rows of each source ──shuffled per epoch──┐
    rows of each source ──shuffled per epoch──┴─ by weight ──► Prompt, Prompt, DeadLetter, Prompt, …

The cursor is one integer: the same seed, sources and cursor give the same prompts. A row that
cannot be tokenized, or not within the limit, becomes a dead letter with the reason.
"""

from __future__ import annotations

import random
from array import array
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from string import Formatter
from typing import Any

import numpy as np

from async_opd.core.errors import RolloutFault, SourceError, in_words
from async_opd.core.row import Media, PromptText, Row, images_of, value_at
from async_opd.core.samples import NO_TEACHER, NO_VERSION, DeadLetter, Header, Prompt
from async_opd.core.sequence import Int32
from async_opd.core.uid import Uid
from async_opd.data.mixture import Mixture
from async_opd.data.streamed_rows import StreamedRows, number_of

Encode = Callable[[PromptText], list[int]]
Route = Callable[[str], str | None]
IMAGE = "\ufdd1"
"""A noncharacter around an image's SHA-256 in a text; Unicode reserves it for programs."""
Sized = Callable[[Media], int]
"""The most tokens that a model computes for an image."""


def to_prompt(
    row: Row,
    encode: Encode,
    route: Route,
    epoch: int = 0,
    graded: bool = False,
    limit: int | None = None,
    readers: Mapping[str, Callable[[Row], list[int]]] | None = None,
    truncate: bool = False,
    sized: Sized | None = None,
) -> Prompt:
    """Tokenizes and routes a row; the prompt's uid has the row's and the epoch.

    The prompt has the row, without its images' bytes, if its rollouts are ``graded``.
    ``readers`` are of the teachers that read another prompt (``async_opd.data.teacher_prompts``).
    ``truncate`` cuts off what is before the last ``limit`` tokens of a prompt without images.
    ``sized`` is the number of tokens of an image, which has one placeholder in the prompt.
    RolloutFault if the row has no teacher, or not 1 to ``limit`` tokens.
    """
    teacher = _teacher(row, route)
    bounds = (limit, truncate, sized)
    ids = _encoded(row, lambda row: encode(row.prompt), *bounds)
    reader = (readers or {}).get(teacher)
    teacher_ids = None if reader is None else _encoded(row, reader, *bounds)
    graded_row = replace(row, encoded={}) if graded else None
    own = (_uid(row, epoch), row.data_source, teacher, ids)
    return Prompt(*own, graded_row, teacher_ids, row.images, row.encoded)


def _encoded(
    row: Row,
    read: Callable[[Row], list[int]],
    limit: int | None,
    truncate: bool,
    sized: Sized | None,
) -> Int32:
    try:
        ids = np.asarray(read(row), dtype=np.int32)
        ids = ids[-limit:] if truncate and limit and not row.images else ids
        length = len(ids) + (added(row, sized) if limit and sized else 0)
    except Exception as error:  # a chat template can raise anything
        cause = f"row {row.uid} cannot be tokenized: {in_words(error)}"
        raise RolloutFault("prompt", cause, "correct the prompt or the chat template") from error
    if not 1 <= length <= (limit or length):
        bound = "" if limit is None else f", at most {limit} fit"
        cause = f"row {row.uid} has {length} tokens{bound}"
        raise RolloutFault("prompt", cause, "shorten or remove it")
    return ids


def added(row: Row, sized: Sized) -> int:
    """How many more tokens the row's images have than placeholders."""
    return sum(sized(image) - 1 for image in row.images)


def _uid(row: Row, epoch: int) -> Uid:
    return Uid(f"{row.uid}#{epoch}")


def _teacher(row: Row, route: Route) -> str:
    teacher = route(row.data_source)
    if teacher is None:
        cause = f"no teacher for data source {row.data_source!r} (row {row.uid})"
        raise RolloutFault("prompt", cause, "add it to the sources of a teacher")
    return teacher


def filled(template: str, row: Row) -> PromptText:
    """The template with the row's fields. ValueError for a field that the row lacks.

    A template of a single field in braces gives the field unchanged, which may be chat messages.
    """
    parts = list(Formatter().parse(template))
    whole: PromptText | None = value_at(row.fields, parts[0][1] or "")
    if len(parts) == 1 and parts[0][0] == "" and whole is not None:
        return whole
    try:
        text = _Dotted().vformat(template, (), row.fields)
        return _with_images(text) if row.images else text
    except (LookupError, AttributeError) as error:
        has = ", ".join(row.fields)
        message = f"prompt_template needs {error}, row {row.uid} has {has}"
        raise ValueError(message) from error


class _Dotted(Formatter):
    """Dots in names lead to fields inside of others, as in ``data.answer``."""

    def get_field(self, name: str, args: Sequence[Any], fields: Mapping[str, Any]) -> Any:
        found = value_at(fields, name)
        if found is None:
            return super().get_field(name, args, fields)
        return _marked(found), name


def _marked(value: Any) -> Any:
    """Of a single message with images its text, with a mark for each image; else the value."""
    message = value[0] if isinstance(value, list) and len(value) == 1 else None
    content = message.get("content") if isinstance(message, dict) else None
    if not isinstance(content, list) or not any(images_of(value)):
        return value
    texts = (
        f"{IMAGE}{part['image']}{IMAGE}" if "image" in part else str(part.get("text", ""))
        for part in content
        if isinstance(part, dict)
    )
    return "".join(texts)


def _with_images(text: str) -> PromptText:
    """A text whose marks are images, as a user's message; without one it stays a text."""
    texts = text.split(IMAGE)
    if len(texts) == 1:
        return text
    kinds = ("text", "image")  # in turn
    parts = [{"type": kinds[at % 2], kinds[at % 2]: one} for at, one in enumerate(texts) if one]
    return [{"role": "user", "content": parts}]


class _Epochs:
    """A sequence of rows in epochs, each of which is shuffled as a whole."""

    def __init__(self, rows: Sequence[Row]) -> None:
        self._rows = rows
        self._order: tuple[int, Sequence[int]] = (-1, ())

    def taken(self, count: int, seed: str | None) -> tuple[Row, int]:
        """The row that follows the first ``count``, and its epoch."""
        epoch, position = divmod(count, len(self._rows))
        if seed is None:
            return self._rows[position], epoch
        if self._order[0] != epoch:
            order = array("Q", range(len(self._rows)))
            random.Random(f"{seed}/{epoch}").shuffle(order)
            self._order = epoch, order
        return self._rows[self._order[1][position]], epoch

    def find(self, number: int) -> Row:
        """The row with this number in its uid. KeyError if there is none."""
        at = bisect_left(self._rows, number, key=number_of)
        if at == len(self._rows) or number_of(self._rows[at]) != number:
            raise KeyError(number)
        return self._rows[at]


class PromptStream:
    """An endless stream over several sources by weight, each of them in epochs.

    The rows of a sequence are shuffled as a whole in each epoch, those of a streamed source within
    their window. A bad row of a streamed source becomes a dead letter.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[Row] | StreamedRows],
        weights: Sequence[float] | Mixture,
        encode: Encode,
        route: Route,
        *,
        seed: int,
        shuffle: bool = True,
        cursor: int = 0,
        graded: bool = False,
        limit: int | None = None,
        readers: Mapping[str, Callable[[Row], list[int]]] | None = None,
        truncate: bool = False,
        sized: Sized | None = None,
    ) -> None:
        """``limit``: bound of a prompt's tokens. The rest of the options: see ``to_prompt``.

        ``weights`` of the sources, or a new mixture of them.
        """
        self._limit = limit
        self._sources = [
            rows if isinstance(rows, StreamedRows) else _Epochs(rows) for rows in sources
        ]
        self._mixture = weights if isinstance(weights, Mixture) else Mixture([(0, weights)])
        self._encode, self._route = encode, route
        self._seed, self._shuffle, self._graded = seed, shuffle, graded
        self._readers, self._truncate, self._sized = readers, truncate, sized
        for _ in range(cursor):
            self._mixture.advance()

    @property
    def cursor(self) -> int:
        """Prompts taken so far."""
        return self._mixture.cursor

    @property
    def metrics(self) -> dict[str, float]:
        """How many rows streamed sources have left out, if any may: ``data.overlong: filter``."""
        streamed = [one for one in self._sources if isinstance(one, StreamedRows)]
        counts = [one.left_out for one in streamed if one.left_out is not None]
        return {"data/overlong_rows": float(sum(counts))} if counts else {}

    def next(self, count: int) -> list[Prompt | DeadLetter]:
        """The next ``count`` prompts; a bad prompt is a dead letter.

        SourceError if the next prompt cannot be read. Prompts before it are returned first, in a
        shorter list: the cursor never passes a prompt that no caller got.
        """
        found: list[Prompt | DeadLetter] = []
        for _ in range(count):
            source, taken = self._mixture.advance()
            try:
                found.append(self._prompt(source, taken))
            except SourceError:
                self._mixture.back(source)
                if found:
                    break
                raise
        return found

    def read_ahead(self) -> None:
        """Reads what the next prompt of each source needs.

        ``next`` takes long without it where the cursor is far into a streamed source.
        """
        for source, rows in enumerate(self._sources):
            with suppress(SourceError):  # ``next`` raises it when the row's turn comes
                rows.taken(self._mixture.taken[source], self._source_seed(source))

    def find(self, uid: Uid) -> Prompt:
        """An earlier prompt of this stream, by its uid. KeyError if the data has no such row."""
        name, _, epoch = uid.rpartition("#")
        source, _, number = name.partition(":")
        try:
            row = self._sources[int(source)].find(int(number))
            of = int(epoch)
        except (LookupError, ValueError) as error:
            raise KeyError(uid) from error
        return self._encoded(row, of)

    def _prompt(self, source: int, taken: int) -> Prompt | DeadLetter:
        row, epoch = self._sources[source].taken(taken, self._source_seed(source))
        if isinstance(row, SourceError):
            return self._dead_letter(Uid(f"{source}:{(row.row or 1) - 1}#{epoch}"), "", str(row))
        try:
            return self._encoded(row, epoch)
        except RolloutFault as fault:
            return self._dead_letter(_uid(row, epoch), row.data_source, fault.cause)

    def _source_seed(self, source: int) -> str | None:
        return f"{self._seed}/{source}" if self._shuffle else None

    def _dead_letter(self, uid: Uid, data_source: str, reason: str) -> DeadLetter:
        header = Header(uid, 0, 0, NO_VERSION, self._route(data_source) or NO_TEACHER)
        return DeadLetter(header, reason, "prompt")

    def _encoded(self, row: Row, epoch: int) -> Prompt:
        options = (self._graded, self._limit, self._readers, self._truncate, self._sized)
        return to_prompt(row, self._encode, self._route, epoch, *options)
