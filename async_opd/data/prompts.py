"""An endless, deterministic stream of prompts from several sources, mixed by weight.

    rows of each source ──shuffled per epoch──┐
    rows of each source ──shuffled per epoch──┴─ by weight ──► Prompt, Prompt, DeadLetter, Prompt, …

The cursor is one integer: the same seed, sources and cursor give the same prompts. A row that
cannot be tokenized, or not within the limit, comes as what was lost, with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from string import Formatter

import numpy as np

from async_opd.core.errors import RolloutFault
from async_opd.core.row import PromptText, Row
from async_opd.core.samples import NO_VERSION, DeadLetter, Header, Int32, Prompt
from async_opd.core.uid import Uid

Encode = Callable[[PromptText], list[int]]
Route = Callable[[str], str | None]


def to_prompt(
    row: Row,
    encode: Encode,
    route: Route,
    epoch: int = 0,
    graded: bool = False,
    limit: int | None = None,
    templates: Mapping[str, str] | None = None,
) -> Prompt:
    """Tokenizes and routes a row; its uid says the epoch too.

    The row goes along if its rollouts are to be ``graded``. KeyError without a teacher;
    RolloutFault if it cannot be tokenized, or not into 1 to ``limit`` tokens. ``templates`` are
    those of teachers that see another prompt than the student.
    """
    teacher = _teacher(row, route)
    ids = _encoded(row, lambda: row.prompt, encode, limit)
    template = (templates or {}).get(teacher)
    seen = None
    if template is not None:
        seen = _encoded(row, lambda: filled(template, row), encode, limit)
    return Prompt(_uid(row, epoch), row.data_source, teacher, ids, row if graded else None, seen)


def _encoded(row: Row, text: Callable[[], PromptText], encode: Encode, limit: int | None) -> Int32:
    try:
        ids = np.asarray(encode(text()), dtype=np.int32)
    except Exception as error:  # a chat template can raise anything
        cause = f"row {row.uid} cannot be tokenized: {type(error).__name__}: {error}"
        raise RolloutFault("prompt", cause, "mend the prompt or the chat template") from error
    if not 1 <= len(ids) <= (limit or len(ids)):
        most = "" if limit is None else f", at most {limit} fit"
        cause = f"row {row.uid} has {len(ids)} tokens{most}"
        raise RolloutFault("prompt", cause, "shorten or remove it")
    return ids


def _uid(row: Row, epoch: int) -> Uid:
    return Uid(f"{row.uid}#{epoch}")


def _teacher(row: Row, route: Route) -> str:
    teacher = route(row.data_source)
    if teacher is None:
        raise KeyError(f"no teacher for data source {row.data_source!r} (row {row.uid})")
    return teacher


def filled(template: str, row: Row) -> PromptText:
    """The template with the row's fields. ValueError for one that the row does not have.

    A template that is a single field in braces gives the field itself: chat messages stay such.
    """
    parts = list(Formatter().parse(template))
    if len(parts) == 1 and parts[0][0] == "" and parts[0][1] in row.fields:
        whole: PromptText = row.fields[parts[0][1]]
        return whole
    try:
        return Formatter().vformat(template, (), row.fields)
    except (LookupError, AttributeError) as error:
        has = ", ".join(row.fields)
        message = f"prompt_template asks for {error}, row {row.uid} has {has}"
        raise ValueError(message) from error


class PromptStream:
    """Rows of several sources by weight, each source from start to end, epoch after epoch."""

    def __init__(
        self,
        sources: Sequence[Sequence[Row]],
        weights: Sequence[float],
        encode: Encode,
        route: Route,
        *,
        seed: int,
        shuffle: bool = True,
        cursor: int = 0,
        graded: bool = False,
        limit: int | None = None,
        templates: Mapping[str, str] | None = None,
    ) -> None:
        """``limit``: most tokens of a prompt."""
        self._limit = limit
        self._sources = [list(rows) for rows in sources]
        self._weights, self._total = list(weights), float(sum(weights))
        self._encode, self._route = encode, route
        self._seed, self._shuffle, self._graded = seed, shuffle, graded
        self._templates = templates
        self._taken = [0] * len(sources)
        self._orders: dict[int, tuple[int, list[int]]] = {}
        self._rows: dict[str, Row] = {}
        self._cursor = 0
        for _ in range(cursor):
            self._advance()

    @property
    def cursor(self) -> int:
        """Prompts taken so far."""
        return self._cursor

    def next(self, count: int) -> list[Prompt | DeadLetter]:
        """The next prompts, and those that cannot be sampled."""
        return [self._prompt(*self._advance()) for _ in range(count)]

    def find(self, uid: Uid) -> Prompt:
        """A prompt that this stream gave before. KeyError if the data has no such row."""
        name, _, epoch = uid.rpartition("#")
        if not self._rows:
            self._rows = {row.uid: row for rows in self._sources for row in rows}
        return self._encoded(self._rows[name], int(epoch))

    def _advance(self) -> tuple[int, int]:
        """The next source, and how many it gave before.

        Of the sources that are behind their share, the one whose next prompt is due first: at all
        times each source is within one prompt of its share.
        """
        sources = range(len(self._sources))
        step = self._cursor + 1
        behind = [i for i in sources if self._taken[i] * self._total < self._weights[i] * step]
        source = min(behind or sources, key=lambda i: ((self._taken[i] + 1) / self._weights[i], i))
        taken = self._taken[source]
        self._taken[source] += 1
        self._cursor += 1
        return source, taken

    def _prompt(self, source: int, taken: int) -> Prompt | DeadLetter:
        rows = self._sources[source]
        epoch, position = divmod(taken, len(rows))
        row = rows[self._order(source, epoch)[position]]
        try:
            return self._encoded(row, epoch)
        except RolloutFault as fault:
            header = Header(_uid(row, epoch), 0, 0, NO_VERSION, _teacher(row, self._route))
            return DeadLetter(header, fault.cause, fault.stage)

    def _encoded(self, row: Row, epoch: int) -> Prompt:
        how = (self._graded, self._limit, self._templates)
        return to_prompt(row, self._encode, self._route, epoch, *how)

    def _order(self, source: int, epoch: int) -> list[int]:
        known = self._orders.get(source)
        if known is None or known[0] != epoch:
            order = list(range(len(self._sources[source])))
            if self._shuffle:
                random.Random(f"{self._seed}/{source}/{epoch}").shuffle(order)
            known = self._orders[source] = (epoch, order)
        return known[1]
