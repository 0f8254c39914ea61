"""Scores of response rows, from the final hidden states that an engine has at hand in its worker.

    hidden states of one engine step ──rows asked for, of all requests──► [n, H]
        ──chunk──► engine's own head ──► log-softmax of logits / T ──► given tokens, k best

Only the rows that predict sampled tokens (``core/sequence.py``) need the head. A request may come
in several chunks, and a preempted one may start again: rows are kept by their place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from async_opd.core.sequence import Range, count

EXTRA_ARGS_KEY = "async_opd_rows"
"""Key of ``SamplingParams.extra_args``."""
CHUNK_BYTES = {"cpu": 16 << 20}
CHUNK_BYTES_GPU = 256 << 20
"""Most bytes of float32 logits at a time. On a CPU larger chunks leave the cache: at a vocabulary
of 131,072 a row takes 1.4 ms with 16 MiB and 1.8 ms with 64; with 8 the product is too thin."""
NO_ROWS = torch.empty((0, 0), dtype=torch.int32)


@dataclass(frozen=True)
class RowRequest:
    """What is asked of a request: the rows of these ranges; its last token's is the last of them.

    ``ids`` are int32 [rows, columns] as bytes: tokens to score, the sampled one first. ``top_k`` is
    how many of the best come with them. Neither: the hidden states themselves, which know no
    ``temperature``.
    """

    ranges: tuple[Range, ...]
    ids: bytes = b""
    columns: int = 0
    top_k: int = 0
    temperature: float = 1.0

    def arguments(self) -> dict[str, Any]:
        """As ``SamplingParams.extra_args``."""
        return {EXTRA_ARGS_KEY: vars(self)}

    @classmethod
    def of(cls, extra_args: dict[str, Any] | None) -> RowRequest | None:
        """What ``arguments`` gave, or None for a request of another kind."""
        found = (extra_args or {}).get(EXTRA_ARGS_KEY)
        return None if found is None else cls(**found)

    @property
    def rows(self) -> int:
        """How many rows."""
        return count(self.ranges)

    @property
    def end(self) -> int:
        """The end of the last row: as many tokens of the sequence are needed."""
        return self.ranges[-1][1]

    @property
    def form(self) -> tuple[int, int, float]:
        """What requests have in common whose rows can be scored together."""
        return self.columns, self.top_k, self.temperature

    @property
    def rest(self) -> bool:
        """Whether a support is asked for, the best or the columns but the first: then its rest too.

        The rest is the logarithm of the mass of all tokens outside of the support.
        """
        return self.top_k > 0 or self.columns > 1

    @property
    def width(self) -> int:
        """Numbers in a row of the answer; not of hidden states."""
        return self.columns + 2 * self.top_k + self.rest

    @property
    def states(self) -> bool:
        """Whether the hidden states are wanted."""
        return self.columns == 0 and self.top_k == 0


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start <= i < end`` of a request; their states begin at row ``offset``."""

    request_id: str
    start: int
    end: int
    offset: int


@dataclass
class _OpenRequest:
    """A request that is not answered yet. ``filled`` rows are known.

    ``missed``: some never will be, because the engine read them from its prefix cache.
    """

    wanted: RowRequest
    ids: torch.Tensor
    filled: int = 0
    found: torch.Tensor | None = None
    missed: bool = False

    def note_chunk(self, chunk: Chunk) -> None:
        """Notices rows before this chunk that were not seen."""
        self.missed = self.missed or count(self.wanted.ranges, chunk.start) > self.filled

    def keep(self, low: int, values: torch.Tensor) -> None:
        """The wanted rows from the ``low``-th on."""
        if self.found is None:
            self.found = values.new_empty((self.wanted.rows, values.shape[1]))
        self.found[low : low + len(values)] = values
        self.filled = max(self.filled, low + len(values))

    def answer(self) -> torch.Tensor:
        """All rows, or none if some were missed."""
        return NO_ROWS if self.missed or self.found is None else self.found


@dataclass(frozen=True)
class _ChunkPart:
    """What a chunk has of a request: of the rows that it wants, those of ``low <= i < high``."""

    chunk: Chunk
    request: _OpenRequest
    low: int
    high: int

    @classmethod
    def of(cls, chunk: Chunk, request: _OpenRequest) -> _ChunkPart:
        ranges = request.wanted.ranges
        return cls(chunk, request, count(ranges, chunk.start), count(ranges, chunk.end))

    @property
    def is_last(self) -> bool:
        return self.high == self.request.wanted.rows

    def states(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Views of the chunk's states, one for each range that it has rows of."""
        chunk, found = self.chunk, []
        shift = chunk.offset - chunk.start
        for start, end in self.request.wanted.ranges:
            low, high = max(start, chunk.start), min(end, chunk.end)
            if low < high:
                found.append(hidden[low + shift : high + shift])
        return found

    def ids(self) -> torch.Tensor:
        return self.request.ids[self.low : self.high]


@dataclass
class RowScores:
    """Answers requests as their rows come by.

    ``logits`` is the engine's head: [n, H] to [n, vocabulary].
    """

    logits: Callable[[torch.Tensor], torch.Tensor]
    vocabulary: int
    _open: dict[str, _OpenRequest] = field(default_factory=dict)

    def add(self, request_id: str, wanted: RowRequest) -> None:
        """A request begins; again the same one changes nothing."""
        if request_id not in self._open:
            ids = np.frombuffer(wanted.ids, np.int32).reshape(wanted.rows, wanted.columns).copy()
            self._open[request_id] = _OpenRequest(wanted, torch.from_numpy(ids).long())

    def keep_only(self, alive: Collection[str]) -> None:
        """Forgets every request that is not among these: it was aborted."""
        for gone in [request_id for request_id in self._open if request_id not in alive]:
            del self._open[gone]

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._open.pop(request_id, None)

    def step(self, hidden: torch.Tensor, chunks: Iterable[Chunk]) -> dict[str, torch.Tensor]:
        """Takes what one engine step computed; returns what is complete now, by request.

        A request is complete with the last of its rows, which must be its last token's: an engine
        has no output before. The answer is log-probabilities [rows, columns + top_k], that of the
        rest [rows, 1] where there is a support, and then the best tokens' ids [rows, top_k], as
        int32 bits; or states [rows, H], bfloat16 as its bits.
        It has no rows at all where the engine read the first of them from its prefix cache: such a
        request has to come again without it.
        """
        seen = [
            _ChunkPart.of(c, self._open[c.request_id]) for c in chunks if c.request_id in self._open
        ]
        same: defaultdict[tuple[int, int, float], list[_ChunkPart]] = defaultdict(list)
        for part in seen:
            part.request.note_chunk(part.chunk)
            if part.low < part.high and not part.request.missed:
                same[part.request.wanted.form].append(part)
        for parts in same.values():
            self._fill(hidden, parts)
        last = {part.chunk.request_id for part in seen if part.is_last}
        return {request_id: self._open.pop(request_id).answer() for request_id in last}

    def _fill(self, hidden: torch.Tensor, parts: list[_ChunkPart]) -> None:
        """Scores the rows of several requests together."""
        states = torch.cat([states for part in parts for states in part.states(hidden)])
        wanted = parts[0].request.wanted
        if wanted.states:
            values = states.view(torch.int16) if states.dtype == torch.bfloat16 else states
        else:
            ids = torch.cat([part.ids() for part in parts])
            values = self.score(states, ids, wanted.top_k, wanted.temperature)
        counts = [part.high - part.low for part in parts]
        for part, rows in zip(parts, torch.split(values, counts), strict=True):
            part.request.keep(part.low, rows)

    def score(
        self, states: torch.Tensor, ids: torch.Tensor, top_k: int, temperature: float = 1.0
    ) -> torch.Tensor:
        """Int32 bits [n, ``RowRequest.width``] of states [n, H] and ids [n, columns].

        Float32 log-probabilities of softmax(logits / temperature) over the vocabulary; -inf for a
        token that the head has no row for, and for a rest without any. A given support is distinct
        in each row. Never more than two chunks of logits are alive.
        """
        budget = CHUNK_BYTES.get(states.device.type, CHUNK_BYTES_GPU)
        size = max(1, budget // (4 * self.vocabulary))
        ids = ids.to(states.device)
        found = [
            _scored(self.logits(part), wanted, top_k, temperature)
            for part, wanted in zip(torch.split(states, size), torch.split(ids, size), strict=True)
        ]
        return torch.cat(found)


def _scored(
    logits: torch.Tensor, ids: torch.Tensor, top_k: int, temperature: float
) -> torch.Tensor:
    """Takes the logits over.

    The rest is summed over the tokens outside of the support, below a maximum of its own: 1 - P
    would be rounding where the support has nearly all of the mass. A token that the head has no
    row for is in no sum.
    """
    logits = logits.float()
    if temperature != 1:
        logits.div_(temperature)
    last = logits.shape[1] - 1
    own = logits.gather(1, ids.clamp(0, last)).masked_fill_(ids > last, -torch.inf)
    best, best_ids = logits.topk(top_k)
    support, inside = (best_ids, best) if top_k else (ids[:, 1:], own[:, 1:])
    rows = support.clamp(0, last)
    left = logits.gather(1, rows).masked_fill_(support <= last, -torch.inf)
    logits.scatter_reduce_(1, rows, left, "amin")
    peak = logits.amax(1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
    rest = peak + logits.sub_(peak).exp_().sum(1, keepdim=True).log_()
    found = [own, best, rest] if support.shape[1] else [own]
    total = torch.logaddexp(rest, inside.logsumexp(1, keepdim=True))
    return torch.cat([*((part - total).view(torch.int32) for part in found), best_ids.int()], 1)


def logprobs_of(bits: NDArray[np.int32], top_k: int) -> NDArray[np.float32]:
    """The log-probabilities of what ``score`` gave: float32, all columns but the best's ids."""
    return bits[:, : bits.shape[1] - top_k].view(np.float32)
