"""The bias of a teacher's precision, against sums over the whole vocabulary in float64."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.scores import TopK
from async_opd.tools.doctor.distances import Float64, PrecisionBias
from tests.properties import examples
from tests.tools.probe.pairs import softmax, topk

VOCABULARY, LENGTHS = 40, (3, 1, 5)


def drawn(seed: int, spread: float) -> tuple[list[Float64], list[Float64], list[Float64]]:
    """Probabilities [R, V] of each response: whole, of low precision, the student's."""
    random = np.random.default_rng(seed)
    whole, low, student = [], [], []
    for length in LENGTHS:
        logits = random.normal(0, 2, (length, VOCABULARY))
        whole.append(softmax(logits))
        low.append(softmax(logits + random.normal(0, spread, logits.shape)))
        student.append(softmax(random.normal(0, 2, logits.shape)))
    return whole, low, student


def exact(one: Sequence[Float64], other: Sequence[Float64]) -> float:
    """The mean over all positions of Σ p log(p / q)."""
    p, q = np.concatenate(one), np.concatenate(other)
    return float((p * np.log(p / q)).sum(1).mean())


def scores(parts: Sequence[Float64], k: int) -> list[TopK]:
    return [topk(one, [0] * len(one), k) for one in parts]


@given(seed=st.integers(0, 10**6), spread=st.sampled_from([0.01, 0.1, 1.0]))
@examples(50)
def test_by_the_whole_vocabulary_the_share_is_exact(seed: int, spread: float) -> None:
    parts = drawn(seed, spread)
    whole, low, student = parts
    found = PrecisionBias.of(*(scores(one, VOCABULARY) for one in parts))
    bias, signal = exact(whole, low), exact(whole, student)
    assert found.tokens == sum(LENGTHS)
    assert found.bias == pytest.approx(bias, abs=1e-6)
    assert found.signal == pytest.approx(signal, abs=1e-5)
    assert found.share == pytest.approx(bias / signal, abs=1e-6)


@given(seed=st.integers(0, 10**6))
@examples(50)
def test_by_fewer_tokens_bias_and_signal_are_lower_bounds(seed: int) -> None:
    parts = drawn(seed, 0.5)
    whole, low, student = parts
    found = PrecisionBias.of(*(scores(one, 8) for one in parts))
    assert 0 < found.bias <= exact(whole, low) + 1e-6
    assert 0 < found.signal <= exact(whole, student) + 1e-6


def test_a_teacher_that_is_the_student_has_no_share_and_any_bias_is_too_large() -> None:
    whole, low, _ = (scores(one, VOCABULARY) for one in drawn(0, 0.1))
    found = PrecisionBias.of(whole, low, whole)
    assert found.share is None
    assert "the signal is 0: KL(teacher ‖ student)" in str(found)
    assert found.problem("run.yaml", "t", 0.1) is not None
    assert PrecisionBias.of(whole, whole, whole).problem("run.yaml", "t", 0.1) is None


def test_a_bias_at_its_bound_is_allowed_and_one_above_it_names_the_key() -> None:
    found = PrecisionBias(10, 0.25, 1.0, 0.25)
    assert found.problem("run.yaml", "t", 0.25) is None
    problem = found.problem("run.yaml", "t", 0.24)
    assert problem is not None
    assert (problem.where, problem.key) == ("run.yaml", "teachers.t.max_bias")
    assert "25.0% of the signal KL(teacher ‖ student) 1, over 10 tokens" in problem.message


def test_responses_without_a_token_have_no_bias() -> None:
    none = [topk(np.zeros((0, 2)), [])]
    with pytest.raises(ValueError, match="no response has a token"):
        PrecisionBias.of(none, none, none)
