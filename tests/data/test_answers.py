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


def test_an_answer_is_followed_by_the_end_of_a_response() -> None:
    rollout = GIVEN.rollout(prompt("abc"))
    assert (rollout.response_ids.tolist(), rollout.finish_reason) == ([1, 2, 3, END], "stop")


def test_an_answer_that_is_too_long_is_cut_off_without_its_end() -> None:
    rollout = GIVEN.rollout(prompt("abcdef"))
    assert (rollout.response_ids.tolist(), rollout.finish_reason) == ([1, 2, 3, 4], "length")


def test_an_empty_answer_is_the_end_alone() -> None:
    assert GIVEN.rollout(prompt("")).response_ids.tolist() == [END]


def test_a_row_without_an_answer_is_a_fault_with_its_remedy() -> None:
    with pytest.raises(RolloutFault, match=r"0:0#0 has no answer.*\n.*data\.answer"):
        GIVEN.rollout(prompt(None))


def test_an_answer_that_cannot_be_tokenized_is_a_fault_with_its_row() -> None:
    with pytest.raises(RolloutFault, match="the answer of row 0:0#0 cannot be tokenized"):
        GivenAnswers("".index, END, limit=4).rollout(prompt("abc"))  # type: ignore[arg-type]


def test_a_supervised_sample_gives_each_token_all_mass() -> None:
    sample = supervised(GIVEN.rollout(prompt("abc")))
    assert isinstance(sample.scores, SampledLogprobs)
    assert sample.scores.logprobs.tolist() == [0.0] * 4


def test_a_supervised_sample_does_not_carry_its_row() -> None:
    assert supervised(GIVEN.rollout(prompt("abc"))).rollout.prompt.row is None
