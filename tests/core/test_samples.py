"""Scores that are no numbers never become samples."""

from __future__ import annotations

import numpy as np
import pytest

from async_opd.core.errors import ScoreError
from async_opd.core.samples import (
    CandidateLogprobs,
    HiddenStates,
    Sample,
    SampledLogprobs,
    Scores,
    TopK,
)
from tests.conftest import make_rollout

NAN, INF = float("nan"), float("inf")


def column(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def matrix(value: float) -> np.ndarray:
    return np.array([[-1.0, -2.0], [-1.0, value]], np.float32)


def bits(*values: float) -> np.ndarray:
    """bfloat16: the upper half of float32."""
    return (np.array([values], np.float32).view(np.uint32) >> 16).astype(np.uint16).reshape(2, 1)


IDS = np.zeros((2, 2), np.int32)
FINE = column(-1.0, -1.0)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize(
    "made",
    [
        lambda v: SampledLogprobs(column(-1.0, v)),
        lambda v: TopK(IDS, matrix(v), FINE),
        lambda v: TopK(IDS, matrix(-3.0), column(-1.0, v)),
        lambda v: CandidateLogprobs(IDS, matrix(v), FINE),
        lambda v: HiddenStates(matrix(v), "float32"),
        lambda v: HiddenStates(matrix(-v), "float32"),
        lambda v: HiddenStates(matrix(v).astype(np.float16), "float16"),
        lambda v: HiddenStates(bits(1.0, v), "bfloat16"),
        lambda v: HiddenStates(bits(1.0, -v), "bfloat16"),
    ],
)
def test_nan_and_infinity_are_refused_with_the_uid_and_the_teacher(
    value: float, made: object
) -> None:
    scores: Scores = made(value)  # type: ignore[operator]
    with pytest.raises(ScoreError, match="sample p/0 of teacher t: NaN or infinity in its"):
        Sample(make_rollout("p/0", tokens=2), scores)


@pytest.mark.parametrize(
    "scores",
    [
        TopK(IDS, matrix(-INF), FINE),
        SampledLogprobs(column(-INF, -1.0)),
        HiddenStates(bits(-3.0e38, 3.0e38), "bfloat16"),
        HiddenStates(np.zeros((2, 0), np.float32), "float32"),
    ],
)
def test_what_a_teacher_excludes_and_large_states_are_taken(scores: Scores) -> None:
    Sample(make_rollout("p/0", tokens=2), scores)
