"""Scores of the rows that predict sampled tokens, computed in the engine's worker.

    hidden states of one engine step ──rows that requests want──► [n, H]
        ──chunk──► engine's own head ──► log-softmax of logits / T ──► given tokens, k best

Only the wanted rows (``core/sequence.py``) pass through the head. The engine computes a request in
one or several chunks, and a preempted request from its start again: ``_OpenRequest`` therefore
stores each row at its index in the answer.
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
"""Maximal bytes of float32 logits in a chunk. On a CPU larger chunks do not fit the cache: at a
vocabulary of 131,072 a row takes 1.4 ms with 16 MiB and 1.8 ms with 64; with 8 MiB the matrix
product has too few rows."""
NO_ROWS = torch.empty((0, 0), dtype=torch.int32)


@dataclass(frozen=True)
class RowRequest:
    """The rows that one request wants; the row of its last token is the last of ``ranges``.

    ``ids`` are int32 [rows, columns] as bytes: tokens to score, the sampled one first. ``top_k`` is
    the number of most probable tokens to add. With neither, the answer is the hidden states
    themselves, to which ``temperature`` does not apply.
    """

    ranges: tuple[Range, ...]
    ids: bytes = b""
    columns: int = 0
    top_k: int = 0
    temperature: float = 1.0

    def arguments(self) -> dict[str, Any]:
        """This request as ``SamplingParams.extra_args``."""
        return {EXTRA_ARGS_KEY: vars(self)}

    @classmethod
    def of(cls, extra_args: dict[str, Any] | None) -> RowRequest | None:
        """The request that ``arguments`` encoded; None if the arguments hold none."""
        found = (extra_args or {}).get(EXTRA_ARGS_KEY)
        return None if found is None else cls(**found)

    @property
    def rows(self) -> int:
        """Number of wanted rows."""
        return count(self.ranges)

    @property
    def end(self) -> int:
        """The end of the last range: the engine needs this many tokens of the sequence."""
        return self.ranges[-1][1]

    @property
    def width(self) -> int:
        """Columns of an answer of scores: log-probabilities, then ids of the best.

        With a support (the best, or all columns but the first) one log-probability is that of the
        rest: of all tokens outside of the support.
        """
        has_support = self.top_k > 0 or self.columns > 1
        return self.columns + 2 * self.top_k + has_support

    @property
    def states(self) -> bool:
        """Whether the answer is hidden states instead of scores."""
        return self.columns == 0 and self.top_k == 0


@dataclass(frozen=True)
class Chunk:
    """Tokens ``start <= i < end`` of a request; their hidden states begin at row ``offset``."""

    request_id: str
    start: int
    end: int
    offset: int


@dataclass
class _OpenRequest:
    """A request that has no answer yet. Of its rows the first ``filled`` are computed.

    ``missed``: the engine read a wanted row from its prefix cache and will not compute it.
    """

    wanted: RowRequest
    ids: torch.Tensor
    filled: int = 0
    found: torch.Tensor | None = None
    missed: bool = False

    def store(self, low: int, values: torch.Tensor) -> None:
        """Stores the values of the wanted rows from the ``low``-th on."""
        if self.found is None:
            self.found = values.new_empty((self.wanted.rows, values.shape[1]))
        self.found[low : low + len(values)] = values
        self.filled = max(self.filled, low + len(values))

    def ids_on(self, device: torch.device) -> torch.Tensor:
        """The ids there; copied once, from pinned memory: the host does not wait for a GPU."""
        if self.ids.device != device:
            self.ids = self.ids.pin_memory().to(device, non_blocking=True)
        return self.ids

    def answer(self) -> torch.Tensor:
        """The values of all rows; ``NO_ROWS`` if one was missed."""
        return NO_ROWS if self.missed or self.found is None else self.found


@dataclass
class _ChunkPart:
    """The rows that a request wants of a chunk: the ``low``-th to before the ``high``-th."""

    chunk: Chunk
    request: _OpenRequest

    def __post_init__(self) -> None:
        ranges = self.request.wanted.ranges
        self.low, self.high = count(ranges, self.chunk.start), count(ranges, self.chunk.end)

    def states(self, hidden: torch.Tensor) -> list[torch.Tensor]:
        """Views of ``hidden``, one for each range that the chunk has rows of."""
        chunk, found = self.chunk, []
        shift = chunk.offset - chunk.start  # from a token's index to its row in this step
        for start, end in self.request.wanted.ranges:
            low, high = max(start, chunk.start), min(end, chunk.end)
            if low < high:
                found.append(hidden[low + shift : high + shift])
        return found


@dataclass
class RowScores:
    """Answers requests from the hidden states of the engine's steps.

    ``logits`` is the engine's head: [n, H] to [n, vocabulary].
    """

    logits: Callable[[torch.Tensor], torch.Tensor]
    vocabulary: int
    _open: dict[str, _OpenRequest] = field(default_factory=dict)

    def add(self, request_id: str, wanted: RowRequest) -> None:
        """Opens a request; a second call with its id changes nothing."""
        if request_id not in self._open:
            ids = np.frombuffer(wanted.ids, np.int32).reshape(wanted.rows, wanted.columns).copy()
            self._open[request_id] = _OpenRequest(wanted, torch.from_numpy(ids).long())

    def keep_only(self, alive: Collection[str]) -> None:
        """Forgets every other request: the engine aborted it."""
        self._open = {key: request for key, request in self._open.items() if key in alive}

    def forget(self, request_id: str) -> None:
        """Forgets the request, if it is open."""
        self._open.pop(request_id, None)

    def step(self, hidden: torch.Tensor, chunks: Iterable[Chunk]) -> dict[str, torch.Tensor]:
        """Takes the hidden states of one engine step; returns the answers that it completed.

        A request is complete with the last of its rows. That must be the row of its last token,
        since the engine has no output of a request before. An answer is int32 bits
        [rows, ``width``]: log-probabilities of the given tokens, of the best and of the rest, then
        the ids of the best; or hidden states [rows, H], bfloat16 as int16 bits.
        An answer without rows means that the engine read a wanted row from its prefix cache: the
        caller repeats such a request without the cache.
        """
        seen = [
            _ChunkPart(c, self._open[c.request_id]) for c in chunks if c.request_id in self._open
        ]
        same: defaultdict[tuple[int, int, float], list[_ChunkPart]] = defaultdict(list)
        for part in seen:
            request, wanted = part.request, part.request.wanted
            # A chunk beyond the filled rows: the engine skipped rows that its cache held. A
            # preempted request starts again at 0, or in the cached prefix, below ``filled``.
            request.missed = request.missed or part.low > request.filled
            if part.low < part.high and not request.missed:
                same[wanted.columns, wanted.top_k, wanted.temperature].append(part)
        for parts in same.values():
            self._fill(hidden, parts)
        complete = [part.chunk.request_id for part in seen if part.high == part.request.wanted.rows]
        return {request_id: self._open.pop(request_id).answer() for request_id in complete}

    def _fill(self, hidden: torch.Tensor, parts: list[_ChunkPart]) -> None:
        """Scores rows of requests with equal columns, ``top_k`` and temperature together."""
        states = torch.cat([states for part in parts for states in part.states(hidden)])
        wanted = parts[0].request.wanted
        if wanted.states:
            values = states.view(torch.int16) if states.dtype == torch.bfloat16 else states
        else:
            device = states.device
            ids = torch.cat([part.request.ids_on(device)[part.low : part.high] for part in parts])
            values = self.score(states, ids, wanted.top_k, wanted.temperature)
        counts = [part.high - part.low for part in parts]
        for part, rows in zip(parts, torch.split(values, counts), strict=True):
            part.request.store(part.low, rows)

    def score(
        self, states: torch.Tensor, ids: torch.Tensor, top_k: int, temperature: float = 1.0
    ) -> torch.Tensor:
        """Int32 bits [n, ``RowRequest.width``] of states [n, H] and ids [n, columns] beside them.

        The bits are float32 log-probabilities of softmax(logits / temperature) over the
        vocabulary, then ids. A token without a row in the head has -inf, and so has a rest without
        tokens. The ids of a given support are distinct in each row. At most two chunks of logits
        are in memory at a time.
        """
        budget = CHUNK_BYTES.get(states.device.type, CHUNK_BYTES_GPU)
        size = max(1, budget // (4 * self.vocabulary))
        found = [
            _scored(self.logits(part), wanted, top_k, temperature)
            for part, wanted in zip(torch.split(states, size), torch.split(ids, size), strict=True)
        ]
        return torch.cat(found)


def _scored(
    logits: torch.Tensor, ids: torch.Tensor, top_k: int, temperature: float
) -> torch.Tensor:
    """Scores of one chunk, in place: the content of ``logits`` is lost.

    The rest is summed over the tokens outside of the support, relative to the largest of these
    logits: 1 - P would be mere rounding where the support has nearly all of the mass. Tokens
    without a row in the head take no part in any sum.
    """
    logits = logits.float()
    if temperature != 1:
        logits.div_(temperature)
    last = logits.shape[1] - 1
    # ``clamp`` gives a token without a row some row to read; ``masked_fill_`` then discards it
    own = logits.gather(1, ids.clamp(0, last)).masked_fill_(ids > last, -torch.inf)
    best, best_ids = logits.topk(top_k)
    support, inside = (best_ids, best) if top_k else (ids[:, 1:], own[:, 1:])
    # -inf removes the support from the sum below. "amin" leaves the logit of a clamped token as it
    # is, unless that row is in the support itself: then its -inf wins, in any order.
    rows = support.clamp(0, last)
    left = logits.gather(1, rows).masked_fill_(support <= last, -torch.inf)
    logits.scatter_reduce_(1, rows, left, "amin")
    peak = logits.amax(1, keepdim=True).clamp_min_(torch.finfo(logits.dtype).min)
    rest = peak + logits.sub_(peak).exp_().sum(1, keepdim=True).log_()
    found = [own, best, rest] if support.shape[1] else [own]
    total = torch.logaddexp(rest, inside.logsumexp(1, keepdim=True))
    return torch.cat([*((part - total).view(torch.int32) for part in found), best_ids.int()], 1)


def logprobs_of(bits: NDArray[np.int32], top_k: int) -> NDArray[np.float32]:
    """The log-probabilities in an answer of ``score``, float32: all columns but the ids."""
    return bits[:, : bits.shape[1] - top_k].view(np.float32)
