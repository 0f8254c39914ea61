"""Ways to score, on an engine that is none: what is asked of it, and what becomes of its answers.

In no need of a real engine, but of vllm's classes, which take seconds to import.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from async_opd.core.errors import StageError
from async_opd.core.samples import Rollout
from tests.conftest import make_rollout
from tests.engines import EOS, QUICKSTART, kwargs

pytestmark = pytest.mark.engine

MODEL = QUICKSTART / "models" / "teacher-sort"
K = 3


class Engine:
    """Remembers what it was asked; answers what it was given."""

    def __init__(self, dtype: Any = None, **answer: Any) -> None:
        model = SimpleNamespace(get_vocab_size=lambda: 9, get_hidden_size=lambda: 4, dtype=dtype)
        self.vllm_config = SimpleNamespace(model_config=model)
        self.answer = SimpleNamespace(finished=True, **answer)
        self.asked: list[Any] = []

    async def generate(self, *request: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        yield self.answer

    encode = generate


def spec(kind: Any, device: Any = "cpu") -> Any:
    from teachers.spec import TeacherEngineSpec

    return TeacherEngineSpec("teacher t/0", kwargs(MODEL), kind, K, EOS, device)


def rollout(tokens: int = 2) -> Rollout:
    topk = np.arange(tokens * K, dtype=np.int32).reshape(tokens, K) + 4
    return replace(make_rollout(tokens=tokens, prompt_tokens=3), topk_ids=topk)


def engine_arguments(kind: Any, device: Any = "cpu") -> dict[str, Any]:
    from teachers.scoring import engine_arguments as arguments

    return arguments(spec(kind, device))


@pytest.mark.parametrize(("kind", "device"), [("hidden", "cuda"), ("student_topk", "cpu")])
def test_engines_that_return_states_keep_the_models_precision(kind: str, device: str) -> None:
    arguments = engine_arguments(kind, device)
    assert arguments["runner"] == "pooling"
    assert arguments["hf_overrides"] == {"head_dtype": "model"}


@pytest.mark.parametrize(("kind", "device"), [("teacher_topk", "cpu"), ("student_topk", "cuda")])
def test_engines_with_a_head_give_the_tokens_and_the_sampled_one(kind: str, device: str) -> None:
    assert engine_arguments(kind, device)["max_logprobs"] == K + 1


def test_every_kind_of_score_has_its_way() -> None:
    import torch

    from teachers.scoring import make_scoring

    kinds = [
        ("sampled", "cpu"), ("teacher_topk", "cuda"), ("student_topk", "cuda"),
        ("student_topk", "cpu"), ("hidden", "cuda"),
    ]  # fmt: skip
    engine: Any = Engine(torch.float32)
    found = [type(make_scoring(spec(*kind), engine)).__name__ for kind in kinds]
    assert found == [
        "PromptLogprobs", "PromptLogprobs", "GivenTokens", "GivenTokensByHead", "States",
    ]  # fmt: skip


def given_tokens(engine: Any) -> Any:
    from teachers.prompt_logprobs import GivenTokens

    return GivenTokens(spec("student_topk", "cuda"), engine)


async def test_a_gpu_is_asked_for_the_response_rows_only() -> None:
    engine = Engine(prompt_token_id_logprobs=np.zeros((2, K + 1), np.float32))
    await given_tokens(engine).score(rollout(), "r")
    request, params, name = engine.asked[0]
    assert request["prompt_token_ids"] == [0, 1, 2, 0, 1]
    assert (params.prompt_logprob_start, name) == (2, "r")


async def test_a_gpu_scores_the_sampled_token_and_the_students_top_k() -> None:
    engine = Engine(prompt_token_id_logprobs=np.zeros((2, K + 1), np.float32))
    await given_tokens(engine).score(rollout(), "r")
    asked = engine.asked[0][1].prompt_logprob_token_ids
    assert asked.tolist() == [[0, 4, 5, 6], [1, 7, 8, -1]]  # 9 is beyond the vocabulary of 9


async def test_padding_comes_back_as_a_finite_never() -> None:
    answer = np.array([[-1, -2, -3, -4], [-5, -6, -7, -np.inf]], np.float32)
    scores = await given_tokens(Engine(prompt_token_id_logprobs=answer)).score(rollout(), "r")
    assert scores.logprobs.tolist() == [[-2, -3, -4], [-6, -7, -100]]
    assert scores.sampled_logprobs.tolist() == [-1, -5]


@pytest.mark.parametrize("answer", [None, np.zeros((3, 4), np.float32)])
async def test_scores_of_another_shape_are_an_error(answer: Any) -> None:
    with pytest.raises(StageError, match="p/0"):
        await given_tokens(Engine(prompt_token_id_logprobs=answer)).score(rollout(), "r")


async def test_an_empty_response_asks_nothing_of_a_gpu() -> None:
    engine = Engine()
    scores = await given_tokens(engine).score(rollout(0), "r")
    assert (scores.logprobs.shape, engine.asked) == ((0, K), [])


def states_of(engine: Any) -> Any:
    from teachers.hidden import States

    return States(spec("hidden"), engine)


async def test_states_of_bfloat16_travel_as_their_bits() -> None:
    import torch

    made = torch.randn(4, 4).bfloat16()
    engine = Engine(torch.bfloat16, outputs=SimpleNamespace(data=made))
    scores = await states_of(engine).score(rollout(), "r")
    assert scores.dtype == "bfloat16"
    np.testing.assert_array_equal(scores.states, made[2:].view(torch.uint16).numpy())


async def test_the_last_token_predicts_nothing_and_is_not_sent() -> None:
    import torch

    engine = Engine(torch.float32, outputs=SimpleNamespace(data=torch.zeros(4, 4)))
    await states_of(engine).score(rollout(), "r")
    assert engine.asked[0][0]["prompt_token_ids"] == [0, 1, 2, 0]


async def test_an_empty_response_has_empty_states() -> None:
    import torch

    scores = await states_of(Engine(torch.float32)).score(rollout(0), "r")
    assert scores.states.shape == (0, 4)


async def test_states_of_another_shape_are_an_error() -> None:
    import torch

    engine = Engine(torch.float32, outputs=SimpleNamespace(data=torch.zeros(3, 4)))
    with pytest.raises(StageError, match=r"shape \(3, 4\) for the 4 tokens of p/0"):
        await states_of(engine).score(rollout(), "r")
