"""Answers of rows as responses that are trained on as they are."""

from __future__ import annotations

import numpy as np
import pytest

from async_opd.core.errors import RolloutFault
from async_opd.core.row import Row
from async_opd.core.samples import Prompt
from async_opd.core.scores import SampledLogprobs
from async_opd.data.answers import GivenAnswers, supervised

END = 7
GIVEN = GivenAnswers(lambda text: [ord(letter) - 96 for letter in text], END, limit=4)


def prompt(answer: str | None) -> Prompt:
    row = Row("0:0", "a", "question", answer, {})
    return Prompt("0:0#0", "a", "", np.array([1, 2], np.int32), row)


@pytest.mark.parametrize(
    ("answer", "ids", "reason"),
    [("abc", [1, 2, 3, END], "stop"), ("abcdef", [1, 2, 3, 4], "length"), ("", [END], "stop")],
)
def test_an_answer_is_followed_by_the_end_of_a_response_unless_it_is_too_long(
    answer: str, ids: list[int], reason: str
) -> None:
    rollout = GIVEN.rollout(prompt(answer))
    assert (rollout.response_ids.tolist(), rollout.finish_reason) == (ids, reason)


def test_a_row_without_an_answer_that_can_be_tokenized_is_a_fault_with_its_row() -> None:
    with pytest.raises(RolloutFault, match=r"0:0#0 has no answer.*\n.*data\.answer"):
        GIVEN.rollout(prompt(None))
    with pytest.raises(RolloutFault, match="the answer of row 0:0#0 cannot be tokenized"):
        GivenAnswers("".index, END, limit=4).rollout(prompt("abc"))  # type: ignore[arg-type]


def test_a_supervised_sample_gives_each_token_all_mass_and_does_not_carry_its_row() -> None:
    sample = supervised(GIVEN.rollout(prompt("abc")))
    assert isinstance(sample.scores, SampledLogprobs)
    assert sample.scores.logprobs.tolist() == [0.0] * 4
    assert sample.rollout.prompt.row is None
