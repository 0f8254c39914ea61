"""What passes as the samples of a batch of rollouts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from async_opd.core.batch import Batch
from async_opd.core.errors import StageError
from async_opd.core.samples import Sample
from async_opd.core.scores import CandidateLogprobs, HiddenStates, SampledLogprobs, TopK
from teachers.answers import check
from tests.conftest import make_rollout

R, K = 4, 3
IDS = np.arange(R * K, dtype=np.int32).reshape(R, K)
LOGPROBS = np.full((R, K), -2, np.float32)
SAMPLED = np.array([-1, -np.inf, 0, -3], np.float32)
BITS = np.full((R, 5), 0x3F80, np.uint16)  # 1.0 in bfloat16
SOUND: list[Any] = [
    SampledLogprobs(SAMPLED),
    TopK(IDS, LOGPROBS, SAMPLED),
    TopK(IDS, LOGPROBS, SAMPLED, SAMPLED),
    CandidateLogprobs(IDS, LOGPROBS, SAMPLED),
    CandidateLogprobs(IDS[:, :1], LOGPROBS[:, :1], SAMPLED, SAMPLED),
    HiddenStates(np.ones((R, 5), np.float32), "float32"),
    HiddenStates(BITS, "bfloat16"),
]


def with_value(array: Any, value: float) -> Any:
    changed = array.copy()
    changed.flat[-1] = value
    return changed


UNSOUND: list[Any] = [
    SampledLogprobs(with_value(SAMPLED, np.nan)),
    SampledLogprobs(with_value(SAMPLED, 0.5)),
    SampledLogprobs(SAMPLED.astype(np.float64)),
    SampledLogprobs(SAMPLED[:, None]),
    TopK(IDS, with_value(LOGPROBS, np.nan), SAMPLED),
    TopK(IDS, with_value(LOGPROBS, np.inf), SAMPLED),
    TopK(with_value(IDS, -1), LOGPROBS, SAMPLED),
    TopK(IDS.astype(np.int64), LOGPROBS, SAMPLED),
    TopK(IDS[:, :2], LOGPROBS, SAMPLED),
    TopK(IDS, LOGPROBS, with_value(SAMPLED, np.nan)),
    TopK(IDS, LOGPROBS, SAMPLED, with_value(SAMPLED, np.nan)),
    TopK(IDS, LOGPROBS, SAMPLED, with_value(SAMPLED, 0.5)),
    TopK(IDS, LOGPROBS, SAMPLED, SAMPLED[:, None]),
    TopK(with_value(IDS, 9), LOGPROBS, SAMPLED),
    CandidateLogprobs(with_value(IDS, 9), LOGPROBS, SAMPLED),
    HiddenStates(with_value(np.ones((R, 5), np.float32), np.inf), "float32"),
    HiddenStates(np.ones((R, 5), np.float16), "float32"),
    HiddenStates(with_value(BITS, 0x7FC0), "bfloat16"),
    HiddenStates(with_value(BITS, 0xFF80), "bfloat16"),
]


def answer(scores: Any) -> Batch:
    """Two samples; the second has these scores."""
    samples = [Sample(make_rollout(f"p/{i}"), SOUND[0]) for i in range(2)]
    object.__setattr__(samples[1], "scores", scores)  # unseen by the checks of a sample
    return Batch.pack(samples)


ASKED = Batch.pack([make_rollout("p/0"), make_rollout("p/1")])


@pytest.mark.parametrize("scores", SOUND)
def test_scores_of_every_kind_pass(scores: Any) -> None:
    check("t", ASKED, answer(scores))


@pytest.mark.parametrize("scores", UNSOUND)
def test_one_wrong_array_anywhere_in_a_batch_is_an_error_with_its_uid(scores: Any) -> None:
    with pytest.raises(StageError, match=r"t: .*p/1"):
        check("t", ASKED, answer(scores))


WHOLE = answer(SOUND[0])


@pytest.mark.parametrize(
    ("asked", "given", "cause"),
    [
        (ASKED, answer(SampledLogprobs(SAMPLED[:2])), "p/1: 4 response tokens"),
        (
            ASKED,
            answer(TopK(with_value(IDS, 9), LOGPROBS, SAMPLED)),
            "p/1 has token 9 twice at position 3",
        ),
        (
            Batch.pack([make_rollout("p/0"), make_rollout("p/2")]),
            WHOLE,
            "answered with 2 other samples",
        ),
        (ASKED, ASKED, "items that are not samples"),
        (ASKED, replace(WHOLE, buffer=WHOLE.buffer[:-1]), "does not fit its headers"),
    ],
    ids=["another length", "a token twice", "others", "rollouts", "cut off"],
)
def test_an_answer_that_does_not_fit_is_an_error(asked: Batch, given: Batch, cause: str) -> None:
    with pytest.raises(StageError, match=cause):
        check("t", asked, given)
