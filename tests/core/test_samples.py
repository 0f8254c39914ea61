"""Rollouts and samples that cannot be are refused where they are made."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from async_opd.core.errors import LengthError, ScoreError
from async_opd.core.samples import Rollout, Sample, VersionSpan
from async_opd.core.scores import CandidateLogprobs, HiddenStates, SampledLogprobs, Scores, TopK
from tests.conftest import make_prompt, make_rollout

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


def test_a_top_k_of_another_length_than_the_response_is_refused() -> None:
    with pytest.raises(LengthError, match="top-k"):
        replace(make_rollout(tokens=4), topk_ids=np.zeros((3, 2), np.int32))


def test_the_oldest_version_is_that_of_the_oldest_token() -> None:
    spans = (VersionSpan(4, 0, 1), VersionSpan(5, 1, 2))
    array = np.zeros(2, np.float32)
    rollout = Rollout.plain("p/0", make_prompt(), array.astype(np.int32), array, spans, "stop")
    assert rollout.oldest_version == 4


@pytest.mark.parametrize("spans", [(), (VersionSpan(0, 0, 1),), (VersionSpan(0, 1, 2),)])
def test_spans_that_leave_a_token_without_a_version_are_refused(
    spans: tuple[VersionSpan, ...],
) -> None:
    array = np.zeros(2, np.float32)
    with pytest.raises(LengthError, match="do not partition"):
        Rollout.plain("p/0", make_prompt(), array.astype(np.int32), array, spans, "stop")


def test_scores_of_another_length_than_the_response_are_refused() -> None:
    with pytest.raises(LengthError, match="4 response tokens"):
        Sample(make_rollout(tokens=4), SampledLogprobs(np.zeros(3, np.float32)))
