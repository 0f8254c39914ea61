"""The requests to an engine for each kind of score, and the use of its answers."""

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
from tests.sequences import sequence

pytestmark = pytest.mark.engine

MODEL = QUICKSTART / "models" / "teacher-sort"
K = 3


class Engine:
    """Remembers what it was asked; answers what it was given, one after the other."""

    def __init__(self, *answers: Any, dtype: Any = None) -> None:
        import torch

        model = SimpleNamespace(
            get_vocab_size=lambda: 9, get_hidden_size=lambda: 4, dtype=dtype or torch.float32
        )
        cache = SimpleNamespace(block_size=4)
        self.vllm_config = SimpleNamespace(model_config=model, cache_config=cache)
        self.model_config, self.renderer = SimpleNamespace(is_multimodal_model=False), None
        self.answers = list(answers)
        self.asked: list[Any] = []

    async def generate(self, *request: Any) -> AsyncIterator[Any]:
        self.asked.append(request)
        yield SimpleNamespace(finished=True, prompt_token_id_logprobs=self.answers.pop(0))


def rollout(tokens: int = 2) -> Rollout:
    topk = np.arange(tokens * K, dtype=np.int32).reshape(tokens, K) + 4
    return replace(make_rollout(tokens=tokens, prompt_tokens=3), topk_ids=topk)


def scoring(engine: Engine, kind: str, temperature: float = 1.0) -> Any:
    from teachers.scoring import RequestScoring
    from teachers.spec import TeacherEngineSpec

    top_k = K if kind.endswith("topk") else 0
    spec = TeacherEngineSpec("teacher t/0", kwargs(MODEL), kind, top_k, EOS, temperature)
    return RequestScoring(spec, engine)


async def score(engine: Engine, kind: str, tokens: int = 2, temperature: float = 1.0) -> Any:
    return await scoring(engine, kind, temperature).score(rollout(tokens), "r")


def bits(*parts: Any) -> Any:
    """An answer of the worker: log-probabilities, then ids."""
    arrays = [
        np.asarray(p, np.float32 if index == 0 else np.int32) for index, p in enumerate(parts)
    ]
    return np.hstack([array.view(np.int32) for array in arrays])


def asked_rows(engine: Engine) -> Any:
    from teachers.rows import RowRequest

    return RowRequest.of(engine.asked[-1][1].extra_args)


async def test_only_the_responses_rows_are_asked_for_and_the_last_token_is_not_sent() -> None:
    """It predicts nothing."""
    engine = Engine(bits([[-1.0], [-2.0]]))
    await score(engine, "sampled")
    wanted = asked_rows(engine)
    assert (wanted.ranges, wanted.columns, wanted.top_k) == (((2, 4),), 1, 0)
    assert engine.asked[0][0]["prompt_token_ids"] == [0, 1, 2, 0]


@pytest.mark.parametrize("last", [[], [("tool", 2)]])
async def test_the_rows_before_each_span_of_the_student_are_asked_for(last: Any) -> None:
    turns = [("student", 2), ("tool", 3), ("student", 1), *last]
    engine, asked = Engine(bits([[-1.0], [-2.0], [-3.0]])), sequence("p/0", turns)
    scores = await scoring(engine, "sampled").score(asked, "r")
    assert engine.asked[0][0]["prompt_token_ids"] == asked.token_ids[:8].tolist()
    assert asked_rows(engine).ranges == ((2, 4), (7, 8))
    assert np.frombuffer(asked_rows(engine).ids, np.int32).tolist() == asked.response_ids.tolist()
    assert scores.logprobs.tolist() == [-1, -2, -3]


async def test_the_sampled_token_comes_first_and_then_the_teachers_best() -> None:
    found = [[-1.0, -2, -3, -4, -0.5], [-5.0, -6, -7, -8, -np.inf]]
    engine = Engine(bits(found, [[1, 2, 3], [4, 5, 6]]))
    scores = await score(engine, "teacher_topk")
    assert scores.rest_logprobs.tolist() == [-0.5, -100]
    assert scores.sampled_logprobs.tolist() == [-1, -5]
    assert scores.logprobs.tolist() == [[-2, -3, -4], [-6, -7, -8]]
    assert scores.ids.tolist() == [[1, 2, 3], [4, 5, 6]]


async def test_the_students_top_k_goes_with_the_sampled_token() -> None:
    engine = Engine(bits([[-1.0, -2, -3, -4, -0.5], [-5.0, -6, -7, -np.inf, -0.25]]))
    scores = await score(engine, "student_topk")
    assert scores.rest_logprobs.tolist() == [-0.5, -0.25]
    asked = np.frombuffer(asked_rows(engine).ids, np.int32).reshape(2, 4)
    assert asked.tolist() == [[0, 4, 5, 6], [1, 7, 8, 9]]
    assert scores.ids.tolist() == [[4, 5, 6], [7, 8, 9]]
    assert scores.logprobs.tolist() == [[-2, -3, -4], [-6, -7, -100]]


async def test_a_rollout_without_the_students_top_k_is_an_error() -> None:
    with pytest.raises(StageError, match="p/0 came without the student's top-k"):
        await scoring(Engine(), "student_topk").score(make_rollout("p/0"), "r")


async def test_states_of_bfloat16_travel_as_their_bits() -> None:
    import torch

    made = np.arange(8, dtype=np.int16).reshape(2, 4)
    scores = await score(Engine(made, dtype=torch.bfloat16), "hidden")
    assert (scores.dtype, scores.states.dtype) == ("bfloat16", np.uint16)
    np.testing.assert_array_equal(scores.states, made)


async def test_a_row_that_was_in_the_prefix_cache_is_asked_for_again_without_it() -> None:
    engine = Engine(np.zeros((0, 0), np.int32), bits([[-1.0], [-2.0]]))
    scores = await score(engine, "sampled")
    assert [request[1].skip_reading_prefix_cache for request in engine.asked] == [False, True]
    assert [request[2] for request in engine.asked] == ["r", "r~"]
    assert scores.logprobs.tolist() == [-1, -2]


@pytest.mark.parametrize(
    ("second", "cached"),
    [
        ([7, 7, 7], True),  # prompts alone are the same: 3 tokens, in a block of 4
        ([0, 7, 7], False),  # the block with the first token of the response is the same
    ],
)
async def test_one_like_another_does_not_read_the_cache(second: list[int], cached: bool) -> None:
    engine, first = Engine(*[bits(np.full((3, 1), -1.0))] * 2), rollout(3)
    made = scoring(engine, "sampled")
    await made.score(first, "a")
    await made.score(replace(first, continuation=np.array(second, np.int32)), "b")
    skipped = [request[1].skip_reading_prefix_cache for request in engine.asked]
    assert skipped == [False, not cached]


@pytest.mark.parametrize("kind", ["sampled", "teacher_topk", "student_topk", "hidden"])
async def test_scores_of_another_shape_are_an_error(kind: str) -> None:
    with pytest.raises(StageError, match=r"shape \(3, 9\), not \(2, \d+\), for r"):
        await score(Engine(np.zeros((3, 9), np.int32)), kind)


@pytest.mark.parametrize("kind", ["sampled", "teacher_topk", "student_topk", "hidden"])
async def test_an_empty_response_asks_nothing_of_the_engine(kind: str) -> None:
    engine = Engine()
    scores = await score(engine, kind, tokens=0)
    assert {len(array) for array in vars(scores).values() if isinstance(array, np.ndarray)} == {0}
    assert engine.asked == []


@pytest.mark.parametrize("kind", ["sampled", "teacher_topk", "student_topk"])
async def test_a_tempered_teacher_is_asked_for_its_temperature(kind: str) -> None:
    columns = {"sampled": 1, "teacher_topk": 2 + 2 * K, "student_topk": 2 + K}[kind]
    engine = Engine(bits(np.full((2, columns), -1.0)))
    await score(engine, kind, temperature=2.0)
    assert asked_rows(engine).temperature == 2


async def test_no_answer_at_all_is_an_error() -> None:
    with pytest.raises(StageError, match="shape None"):
        await score(Engine(None, None), "sampled")
