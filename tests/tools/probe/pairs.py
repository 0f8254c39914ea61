"""Pairs of a student and a teacher as arrays, for the tests of figures and verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from async_opd.core.scores import TopK
from async_opd.tools.doctor.distances import Float64
from async_opd.tools.probe.figures import Measured, Response

VOCABULARY = 6


def softmax(logits: Any) -> Float64:
    """Probabilities [R, V]."""
    scaled = np.exp(np.asarray(logits, np.float64))
    return np.asarray(scaled / scaled.sum(-1, keepdims=True))


def topk(probabilities: Float64, sampled: Sequence[int], k: int = VOCABULARY) -> TopK:
    """The k best of probabilities [R, V], as an engine returns them."""
    order = np.argsort(-probabilities, axis=1)
    logs = np.log(probabilities)
    ids, rest = order[:, :k], order[:, k:]
    outside = np.take_along_axis(probabilities, rest, 1).sum(1)
    return TopK(
        ids.astype(np.int32),
        np.take_along_axis(logs, ids, 1).astype(np.float32),
        logs[np.arange(len(sampled)), list(sampled)].astype(np.float32),
        np.log(np.maximum(outside, 1e-300)).astype(np.float32),
    )


def response(
    teacher: Float64,
    student: Float64,
    grade: float = math.nan,
    other: Float64 | None = None,
    k: int = VOCABULARY,
) -> Response:
    """A response that has token 0 at all positions. ``other``: under the other template."""
    sampled = [0] * len(teacher)
    own = topk(student, sampled, k)
    scored = None if other is None else topk(other, sampled).sampled_logprobs
    return Response(grade, own.sampled_logprobs, topk(teacher, sampled, k), own, scored)


def measured(
    responses: Sequence[Response],
    student: Sequence[float] = (0.0, 1.0),
    teacher: Sequence[float] = (1.0, 1.0),
    **others: Any,
) -> Measured:
    """Of source ``s`` and teacher ``t``, with these grades."""
    return Measured("s", "t", np.array(student), np.array(teacher), responses, **others)
