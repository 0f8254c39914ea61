"""The student's entropy over its whole vocabulary, whatever the objective looks at."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.trainer.oracle import DOUBLE, Case, case, run, term
from trainer.losses import K1, ForwardKL, Objective, OnVocabulary, ReverseKL, Sampled, jsd

OBJECTIVES: dict[str, Any] = {
    "topk": Objective(term(ForwardKL(), "bucket")),
    "full": Objective(term(ReverseKL(), None)),
    "jsd": Objective(term(jsd(0.3), None)),
    "sampled": Objective(Sampled(K1(None))),
}


def entropy_of(name: str, x: Case) -> torch.Tensor:
    return run(
        OBJECTIVES[name], x.states() if isinstance(OBJECTIVES[name].term, OnVocabulary) else x
    )[1]["entropy"]


def exact(logits: torch.Tensor) -> torch.Tensor:
    return torch.distributions.Categorical(logits=logits.detach().double()).entropy()


@given(
    seed=st.integers(0, 99),
    v=st.integers(2, 17),
    k=st.integers(1, 17),
    name=st.sampled_from(sorted(OBJECTIVES)),
    scale=st.floats(0, 30),
)
def test_it_is_that_of_float64(seed: int, v: int, k: int, name: str, scale: float) -> None:
    x = case(seed, v=v, k=min(k, v))
    logits = (x.logits.detach() * scale).requires_grad_()
    found = entropy_of(name, Case(logits, x.teacher, x.tokens))
    assert torch.allclose(found, exact(logits), atol=1e-10)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_uniform_student_has_the_logarithm_of_its_vocabulary(name: str) -> None:
    x = case()
    logits = torch.zeros(6, 11, dtype=DOUBLE, requires_grad=True)
    found = entropy_of(name, Case(logits, x.teacher, x.tokens))
    assert torch.allclose(found, torch.full((6,), math.log(11)).double())


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_certain_student_has_none_in_float32(name: str) -> None:
    x = case()
    logits = torch.zeros(6, 11)
    logits[:, 2] = 1e4
    found = entropy_of(name, Case(logits.requires_grad_(), x.teacher, x.tokens))
    assert found.tolist() == [0.0] * 6


@pytest.mark.parametrize(("student", "teacher"), [(11, 14), (14, 11)])
def test_the_padding_of_the_students_vocabulary_counts(student: int, teacher: int) -> None:
    torch.manual_seed(3)
    logits = torch.randn(6, student, dtype=DOUBLE, requires_grad=True)
    x = Case(logits, torch.randn(6, teacher, dtype=DOUBLE), case(v=11).tokens)
    assert torch.allclose(entropy_of("full", x), exact(logits), atol=1e-12)
