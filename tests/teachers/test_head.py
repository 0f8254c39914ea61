"""A teacher's head outside of its engine, against float64."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from async_opd.core.errors import StageError
from async_opd.core.head_files import HeadFiles, TensorPlace
from teachers import head as head_module
from teachers.candidates import UNKNOWN, candidates, sampled_and_candidates
from teachers.head import Head
from tests.conftest import make_rollout

VOCABULARY, HIDDEN = 11, 4


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> HeadFiles:
    """A head with a bias."""
    torch.manual_seed(0)
    file = tmp_path_factory.mktemp("head") / "model.safetensors"
    tensors = {"w": torch.randn(VOCABULARY, HIDDEN), "b": torch.randn(VOCABULARY)}
    save_file(tensors, file)
    weight = TensorPlace(Path(file), "w", (VOCABULARY, HIDDEN))
    return HeadFiles(weight, TensorPlace(Path(file), "b", (VOCABULARY,)), 0.5, 3.0)


def reference(files: HeadFiles, states: torch.Tensor) -> torch.Tensor:
    """Log-probabilities [R, V] by the formula of head_files.py, float64."""
    from safetensors.torch import load_file

    tensors = load_file(files.weight.file)
    logits = states.double() @ tensors["w"].double().T + tensors["b"].double()
    assert files.soft_cap is not None
    return (torch.tanh(logits / files.soft_cap) * files.soft_cap * files.scale).log_softmax(-1)


@settings(deadline=None)
@given(rows=st.integers(0, 9), k=st.integers(1, VOCABULARY), chunk=st.integers(1, 4))
def test_given_tokens_have_the_log_probabilities_of_the_formula(
    files: HeadFiles, rows: int, k: int, chunk: int
) -> None:
    torch.manual_seed(rows)
    states = torch.randn(rows, HIDDEN)
    ids = torch.rand(rows, VOCABULARY).argsort(-1)[:, :k]
    whole = head_module.CHUNK_BYTES
    try:
        head_module.CHUNK_BYTES = chunk * 4 * VOCABULARY
        found = Head(files, torch.float32).logprobs(states, ids)
    finally:
        head_module.CHUNK_BYTES = whole
    expected = reference(files, states).gather(1, ids)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=0)


def test_a_head_computes_in_the_precision_of_the_states(files: HeadFiles) -> None:
    states = torch.randn(2, HIDDEN, dtype=torch.bfloat16)
    found = Head(files, torch.bfloat16).logits(states)
    expected = Head(files, torch.float32).logits(states.float())
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0)


def test_a_token_beyond_the_teachers_vocabulary_is_as_good_as_never(files: HeadFiles) -> None:
    ids = torch.tensor([[0, VOCABULARY + 2]])
    logprobs = Head(files, torch.float32).logprobs(torch.randn(1, HIDDEN), ids)
    scores = candidates(ids.numpy().astype(np.int32), logprobs.numpy())
    assert scores.logprobs.tolist() == [[UNKNOWN]]


def test_the_sampled_token_goes_before_the_students_top_k() -> None:
    rollout = make_rollout(tokens=2)
    object.__setattr__(rollout, "topk_ids", np.array([[5, 6], [7, 8]], np.int32))
    assert sampled_and_candidates(rollout, "t").tolist() == [[0, 5, 6], [1, 7, 8]]


def test_a_rollout_without_a_top_k_is_an_error_with_its_name() -> None:
    with pytest.raises(StageError, match="p/0 came without the student's top-k"):
        sampled_and_candidates(make_rollout("p/0"), "t")
