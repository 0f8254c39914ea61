"""Spans of a sequence, and the rows of a model's output that predict its sampled tokens.

    position   0 … 3     4 … 6      7 … 9    10 … 12    13 … 18   19 … 21
    origin     prompt    student    tool     student    prompt    student
    row                  3 … 5               9 … 11               18 … 20
    segment    ─────────────── 0 ──────────────────    ──────── 1 ────────

Row t - 1 of a causal model (its hidden state, its logits) predicts token t. Only ``rows_of``
implements this: packing, scoring and endpoints take their rows from it.

Each span of origin ``prompt`` begins a segment: another context, where a chat template
rewrites the history before a turn. A model computes each segment as a sequence by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_opd.core.errors import LengthError
from async_opd.core.uid import Uid

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
"""The arrays of the pipeline's messages."""

PROMPT = "prompt"
STUDENT = "student"

Range = tuple[int, int]
"""Indices ``start <= i < end``."""


class Span(NamedTuple):
    """Tokens ``start <= i < end`` of a sequence; ``origin`` names their source.

    ``prompt``: the context with which a segment begins, in the first one the data source's;
    ``student``: sampled by the student; any other name is context.
    """

    start: int
    end: int
    origin: str


def spans_of(lengths: Iterable[tuple[str, int]]) -> tuple[Span, ...]:
    """The spans of a sequence whose parts have these origins and numbers of tokens, in order.

    A part without tokens has no span.
    """
    spans: list[Span] = []
    end = 0
    for origin, length in lengths:
        if length:
            spans.append(Span(end, end + length, origin))
            end += length
    return tuple(spans)


def check_spans(uid: Uid, spans: Sequence[Span], prompt: int, tokens: int) -> None:
    """LengthError unless the spans partition ``0..tokens`` in order, the prompt's span first.

    ``prompt`` is its number of tokens. The first token of a segment cannot be sampled: no row
    predicts it. It never is in a later one, which begins with a prompt's span.
    """
    at = 0
    for span in spans:
        if span.start != at:
            raise LengthError(f"rollout {uid}: {span} does not begin at {at}, where the last ends")
        if not at < span.end <= tokens:
            raise LengthError(f"rollout {uid}: {span} is empty or ends beyond {tokens} tokens")
        at = span.end
    if at != tokens:
        raise LengthError(f"rollout {uid}: its spans end at {at}, its tokens at {tokens}")
    if spans and spans[0].origin == STUDENT:
        raise LengthError(f"rollout {uid}: its first token is sampled, and no row predicts it")
    if prompt and spans[0] != (0, prompt, PROMPT):
        expected = Span(0, prompt, PROMPT)
        raise LengthError(f"rollout {uid}: its first span is {spans[0]}, its prompt's {expected}")


def sampled_of(spans: Sequence[Span]) -> tuple[Range, ...]:
    """The positions that the student sampled."""
    return tuple((span.start, span.end) for span in spans if span.origin == STUDENT)


def rows_of(spans: Sequence[Span]) -> tuple[Range, ...]:
    """The rows of a model's output that predict the sampled tokens, in their order."""
    return tuple((start - 1, end - 1) for start, end in sampled_of(spans))


def segments_of(spans: Sequence[Span]) -> tuple[Range, ...]:
    """The segments, which partition ``0..T``; one, also of an empty sequence."""
    later = [span.start for span in spans[1:] if span.origin == PROMPT]
    end = spans[-1].end if spans else 0
    return tuple(zip((0, *later), (*later, end), strict=True)) if later else ((0, end),)


def count(ranges: Iterable[Range], below: int = sys.maxsize) -> int:
    """The number of indices in the ranges that are less than ``below``."""
    return sum(max(0, min(end, below) - start) for start, end in ranges)


def indices(ranges: Sequence[Range]) -> NDArray[np.int64]:
    """All indices of the ranges, int64, in order."""
    return np.concatenate([np.empty(0, np.int64), *(np.arange(*one) for one in ranges)])
