"""The scores of a rollout: what its teacher says about the tokens that the student sampled.

They cover sampled positions only. R is their number, k that of the teacher's top-k. A teacher's
log-probabilities are natural logarithms (nats), those of softmax(logits / temperature) over the
full vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from async_opd.core.sequence import Float32, Int32

StateDtype = Literal["float32", "float16", "bfloat16"]

BFLOAT16_INFINITY = 0x7F80
"""Bits of a positive infinite bfloat16; larger numbers without the sign bit are NaNs."""


@dataclass(frozen=True)
class SampledLogprobs:
    """The teacher's log-probability of each sampled token: float32 [R]."""

    logprobs: Float32


@dataclass(frozen=True)
class SupportScores:
    """The teacher's log-probabilities of k tokens at each response position, and the sampled one.

    ``ids`` int32 [R, k], distinct at each position, and their ``logprobs`` float32 [R, k];
    ``sampled_logprobs`` float32 [R]. ``rest_logprobs`` float32 [R] is the logarithm of the mass of
    all tokens outside of ``ids``; None if the teacher does not send it (servers).
    """

    ids: Int32
    logprobs: Float32
    sampled_logprobs: Float32
    rest_logprobs: Float32 | None = None


class TopK(SupportScores):
    """The scores of the teacher's k most probable tokens, by falling probability."""


class CandidateLogprobs(SupportScores):
    """The scores of the student's own k most probable tokens, the rollout's ``topk_ids``."""


@dataclass(frozen=True)
class HiddenStates:
    """The teacher's final hidden states (after its last norm) that predict the response tokens.

    ``states`` [R, H] is float32 or float16, or, for ``dtype`` bfloat16, uint16 with its bits.
    No temperature is applied to them: the trainer's head applies it.
    """

    states: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
    dtype: StateDtype


Scores = SampledLogprobs | TopK | CandidateLogprobs | HiddenStates


def sound(name: str, array: NDArray[Any]) -> bool:
    """Whether an array of scores has no value that it may not have; makes at most one copy."""
    if not array.size or array.dtype == np.int32:
        return True
    if array.dtype == np.uint16:
        return int((array & 0x7FFF).max()) < BFLOAT16_INFINITY
    if name == "states":
        return bool(np.isfinite(array).all())
    return bool(array.max() < np.inf)  # the maximum of an array with a NaN is NaN
