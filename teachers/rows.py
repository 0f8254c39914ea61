"""Scores of response rows, from the final hidden states that an engine has at hand in its worker.

    hidden states of one engine step ──rows asked for, of all requests──► [n, H]
        ──chunk──► engine's own head ──► log-softmax ──► given tokens, k best ──► [rows, columns]

Row P-1+i of a request predicts token i of its response; nothing else needs the head. The prompt may
come in several chunks, and a preempted request may start again: rows are kept by position.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

ARGUMENT = "async_opd_rows"
"""Key of ``SamplingParams.extra_args``."""
CHUNK_BYTES = {"cpu": 64 << 20}
CHUNK_BYTES_GPU = 256 << 20
"""Most bytes of float32 logits at a time."""


@dataclass(frozen=True)
class Wanted:
    """What is asked of a request: ``rows`` rows from position ``start`` on.

    ``ids`` are int32 [rows, columns] as bytes: tokens to score. ``top_k`` is how many of the best
    come with them. Neither: the hidden states themselves.
    """

    start: int
    rows: int
    ids: bytes = b""
    columns: int = 0
    top_k: int = 0

    def arguments(self) -> dict[str, Any]:
        """As ``SamplingParams.extra_args``."""
        return {ARGUMENT: vars(self)}

    @classmethod
    def of(cls, extra_args: dict[str, Any] | None) -> Wanted | None:
        """What ``arguments`` gave, or None for a request of another kind."""
        found = (extra_args or {}).get(ARGUMENT)
        return None if found is None else cls(**found)

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
class _Open:
    """A request that is not answered yet. ``filled`` rows are known."""

    wanted: Wanted
    ids: torch.Tensor
    filled: int = 0
    found: torch.Tensor | None = None

    def keep(self, low: int, values: torch.Tensor) -> None:
        if self.found is None:
            self.found = values.new_empty((self.wanted.rows, values.shape[1]))
        start = low - self.wanted.start
        self.found[start : start + len(values)] = values
        self.filled = max(self.filled, start + len(values))


@dataclass
class RowScores:
    """Answers requests as their rows come by.

    ``logits`` is the engine's head: [n, H] to [n, vocabulary].
    """

    logits: Callable[[torch.Tensor], torch.Tensor]
    vocabulary: int
    _open: dict[str, _Open] = field(default_factory=dict)

    def add(self, request_id: str, wanted: Wanted) -> None:
        """A request begins; again the same one changes nothing."""
        if request_id not in self._open:
            ids = np.frombuffer(wanted.ids, np.int32).reshape(wanted.rows, wanted.columns).copy()
            self._open[request_id] = _Open(wanted, torch.from_numpy(ids).long())

    def keep_only(self, alive: Collection[str]) -> None:
        """Forgets every request that is not among these: it was aborted."""
        for gone in [request_id for request_id in self._open if request_id not in alive]:
            del self._open[gone]

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._open.pop(request_id, None)

    def step(self, hidden: torch.Tensor, chunks: Iterable[Chunk]) -> dict[str, torch.Tensor]:
        """Takes what one engine step computed; returns what is complete now, by request.

        Log-probabilities [rows, columns + top_k] and then the best tokens' ids [rows, top_k], as
        int32 bits; or states [rows, H], bfloat16 as its bits. No rows at all where the engine read
        the first of them from its prefix cache: such a request has to come again without it.
        """
        answers, parts = {}, defaultdict(list)
        for chunk in chunks:
            request = self._open.get(chunk.request_id)
            if request is None:
                continue
            wanted, last = request.wanted, request.wanted.start + request.wanted.rows
            low, high = max(wanted.start, chunk.start), min(last, chunk.end)
            if low - wanted.start > request.filled:
                answers[chunk.request_id] = torch.empty((0, 0), dtype=torch.int32)
            elif low < high:
                parts[wanted.columns, wanted.top_k].append((chunk, request, low, high))
        for same in parts.values():
            self._fill(hidden, same)
        for chunk, request, _, high in (part for same in parts.values() for part in same):
            if high == request.wanted.start + request.wanted.rows and request.found is not None:
                answers[chunk.request_id] = request.found
        for request_id in answers:
            del self._open[request_id]
        return answers

    def _fill(self, hidden: torch.Tensor, parts: list[tuple[Chunk, _Open, int, int]]) -> None:
        """Scores the rows of several requests together."""
        states = torch.cat(
            [
                hidden[c.offset + low - c.start : c.offset + high - c.start]
                for c, _, low, high in parts
            ]
        )
        _, first, *_ = parts[0]
        if first.wanted.states:
            values = states.view(torch.int16) if states.dtype == torch.bfloat16 else states
        else:
            ids = torch.cat(
                [r.ids[low - r.wanted.start : high - r.wanted.start] for _, r, low, high in parts]
            )
            values = self.score(states, ids, first.wanted.top_k)
        counts = [high - low for *_, low, high in parts]
        for (_, request, low, _), rows in zip(parts, torch.split(values, counts), strict=True):
            request.keep(low, rows)

    def score(self, states: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
        """Int32 bits [n, columns + 2 top_k] of states [n, H] and ids [n, columns].

        Float32 log-probabilities over the vocabulary; -inf for a token that the head has no row
        for. Never more than two chunks of logits are alive.
        """
        budget = CHUNK_BYTES.get(states.device.type, CHUNK_BYTES_GPU)
        size = max(1, budget // (4 * self.vocabulary))
        ids = ids.to(states.device)
        found = [
            _scored(self.logits(part), wanted, top_k)
            for part, wanted in zip(torch.split(states, size), torch.split(ids, size), strict=True)
        ]
        return torch.cat(found)


def _scored(logits: torch.Tensor, ids: torch.Tensor, top_k: int) -> torch.Tensor:
    logprobs = logits.float().log_softmax(1)
    rows = logprobs.shape[1]
    own = logprobs.gather(1, ids.clamp(0, rows - 1)).masked_fill_(ids >= rows, float("-inf"))
    best, best_ids = logprobs.topk(top_k)
    return torch.cat([own.view(torch.int32), best.view(torch.int32), best_ids.int()], 1)


def logprobs_of(bits: NDArray[np.int32], columns: int, top_k: int) -> NDArray[np.float32]:
    """Float32 [rows, columns + top_k] of what ``score`` gave."""
    return bits[:, : columns + top_k].view(np.float32)
