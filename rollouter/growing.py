"""A rollout as it comes out of the engine: in one part, or in several of some tokens each.

engine's lists ──add──► arrays ──piece──► what its teacher has not seen yet
                           └────rollout──► all of it, once finished
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from async_opd.core.samples import Piece, Prompt, Rollout, VersionSpan

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


class Growing:
    """A rollout under way; ``top_k`` of the student's best tokens come with each token."""

    def __init__(self, uid: str, prompt: Prompt, top_k: int) -> None:
        self.uid = uid
        self.prompt = prompt
        self._top_k = top_k
        self._parts: list[tuple[NDArray[Any], NDArray[Any], NDArray[Any]]] = []
        self._tokens = 0
        self._sent = 0

    def add(self, output: CompletionOutput) -> None:
        """Further tokens."""
        ids = np.asarray(output.token_ids, dtype=np.int32)
        topk_ids, logprobs = _columns(output.logprobs, len(ids), self._top_k)
        self._parts.append((ids, logprobs, topk_ids))
        self._tokens += len(ids)

    @property
    def unsent(self) -> int:
        """Tokens that are in no piece yet."""
        return self._tokens - self._sent

    def piece(self) -> Piece:
        """All tokens that are in no piece yet."""
        ids, _, topk_ids = self._joined()
        start, self._sent = self._sent, self._tokens
        prompt_ids = self.prompt.seen_by_teacher.token_ids
        return Piece(
            uid=self.uid,
            teacher=self.prompt.teacher,
            start=start,
            prompt_ids=prompt_ids if start == 0 else prompt_ids[:0],
            response_ids=ids[start:],
            topk_ids=topk_ids[start:] if self._top_k else None,
        )

    def rollout(self, last: CompletionOutput) -> Rollout:
        """The whole one; ``last`` is the engine's final output."""
        ids, logprobs, topk_ids = self._joined()
        spans = last.weight_versions or ()
        return Rollout.plain(
            uid=self.uid,
            prompt=self.prompt,
            response_ids=ids,
            rollout_logprobs=logprobs,
            version_spans=tuple(VersionSpan(int(s.version), s.start, s.end) for s in spans),
            finish_reason="stop" if last.finish_reason == "stop" else "length",
            topk_ids=topk_ids if self._top_k else None,
        )

    def _joined(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        if len(self._parts) > 1:
            ids, logprobs, topk_ids = (
                np.concatenate(part) for part in zip(*self._parts, strict=True)
            )
            self._parts = [(ids, logprobs, topk_ids)]
        return self._parts[0]


def _columns(flat: Any, count: int, top_k: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The ``top_k`` best tokens [R, k], and the sampled ones' log-probabilities [R].

    At each position the sampled token comes first, then the best, the sampled one perhaps among
    them. Parts that nobody fetched in time are joined by vLLM through dictionaries, so that it is
    there once: then its rank says where it belongs.
    """
    starts, width = flat.start_indices, 1 + top_k
    logprobs = np.asarray(flat.logprobs, dtype=np.float32)
    if len(logprobs) == count * width:
        ids = np.asarray(flat.token_ids, dtype=np.int32).reshape(count, width)
        return np.ascontiguousarray(ids[:, 1:]), np.ascontiguousarray(logprobs[::width])
    rows = []
    for start, end in zip(starts, flat.end_indices, strict=True):
        sampled, *best = flat.token_ids[start:end]
        if len(best) < top_k:
            best.insert(flat.ranks[start] - 1, sampled)
        rows.append(best)
    return np.asarray(rows, dtype=np.int32), logprobs[np.asarray(starts)]
