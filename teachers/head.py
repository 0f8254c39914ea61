"""A teacher's output head outside of its engine: log-probabilities of given tokens.

    states [R, H] ──chunk of rows──► logits [c, V] ──log-sum-exp, gather──► [c, k]

Only rows of the response are computed, and never more than one chunk of logits is alive.
"""

from __future__ import annotations

import torch
from safetensors import safe_open

from async_opd.core.head_files import HeadFiles, TensorPlace

CHUNK_BYTES = 64 << 20
"""Most bytes of float32 logits at a time."""


class Head:
    """The head in the precision of the states it gets, as vLLM computes logits."""

    def __init__(self, files: HeadFiles, dtype: torch.dtype) -> None:
        self._weight = _load(files.weight).to(dtype)
        self._bias = None if files.bias is None else _load(files.bias).to(dtype)
        self._scale = files.scale
        self._soft_cap = files.soft_cap

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Float32 logits [c, V] of states [c, H], as ``HeadFiles`` says."""
        logits = torch.nn.functional.linear(states, self._weight, self._bias).float()
        if self._soft_cap is not None:
            logits = torch.tanh(logits / self._soft_cap) * self._soft_cap
        return logits * self._scale if self._scale != 1.0 else logits

    @torch.inference_mode()
    def logprobs(self, states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        """Log-probabilities [R, k] of the tokens ``ids`` [R, k], float32, over the vocabulary.

        -inf for a token that the head has no row for.
        """
        vocabulary = len(self._weight)
        rows = max(1, CHUNK_BYTES // (4 * vocabulary))
        found = []
        for start in range(0, len(states) or 1, rows):
            part, wanted = states[start : start + rows], ids[start : start + rows]
            logits = self.logits(part)
            own = logits.gather(1, wanted.clamp(max=vocabulary - 1))
            logprobs = own - logits.logsumexp(1, keepdim=True)
            found.append(logprobs.masked_fill_(wanted >= vocabulary, float("-inf")))
        return torch.cat(found)


def _load(place: TensorPlace) -> torch.Tensor:
    with safe_open(place.file, framework="pt") as opened:
        tensor: torch.Tensor = opened.get_tensor(place.name)
    return tensor
