"""The student's own top-k on its way through a teacher: one array [R, 1 + k] each way.

Column 0 is the sampled token, which may be among the others too.
"""

from __future__ import annotations

import numpy as np

from async_opd.core.errors import StageError
from async_opd.core.samples import CandidateLogprobs, Float32, Int32, Rollout

UNKNOWN = -100.0
"""Log-probability of a token that the teacher has no row for, where the student's vocabulary is
padded further. As good as never (4e-44), and finite: sums and gradients stay so."""


def sampled_and_candidates(rollout: Rollout, name: str) -> Int32:
    """What the teacher has to score. StageError if the rollout carries no top-k."""
    if rollout.topk_ids is None:
        raise StageError(name, f"rollout {rollout.uid} came without the student's top-k")
    return np.column_stack([rollout.response_ids, rollout.topk_ids]).astype(np.int32, copy=False)


def candidates(ids: Int32, logprobs: Float32) -> CandidateLogprobs:
    """The scores of what ``sampled_and_candidates`` gave; -inf becomes ``UNKNOWN``."""
    logprobs = np.maximum(logprobs, np.float32(UNKNOWN), dtype=np.float32)
    return CandidateLogprobs(
        ids=np.ascontiguousarray(ids[:, 1:]),
        logprobs=np.ascontiguousarray(logprobs[:, 1:]),
        sampled_logprobs=np.ascontiguousarray(logprobs[:, 0]),
    )
