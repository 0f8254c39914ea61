"""A real teacher engine: scores against transformers."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from tests.engines import EOS, QUICKSTART, kwargs, prompts, reference_logprobs

pytestmark = pytest.mark.engine

K = 5


def rollouts() -> list[Any]:
    """Responses of 0, 1, 2, … tokens."""
    from async_opd.core.samples import Rollout, VersionSpan

    made = []
    for length, prompt in enumerate(prompts(8)):
        ids = np.arange(20, 20 + length, dtype=np.int32)
        spans = (VersionSpan(0, 0, length),) if length else ()
        logprobs = np.zeros(length, np.float32)
        made.append(Rollout(f"{prompt.uid}/0", prompt, ids, logprobs, spans, "stop"))
    return made


async def scenario() -> Any:
    from async_opd.core.batch import Batch, unpack_samples
    from async_opd.core.stages import SamplingSpec
    from teachers.replica import TeacherReplica
    from teachers.spec import TeacherEngineSpec

    path = QUICKSTART / "models" / "teacher-sort"
    teacher = TeacherReplica(
        TeacherEngineSpec("teacher sort/0", kwargs(path), "teacher_topk", K, EOS)
    )
    try:
        await teacher.ready()
        scored = unpack_samples([await teacher.score(Batch.pack(rollouts()))])
        answers = await teacher.generate(prompts(4), SamplingSpec(8, 0.0, 1.0, 1))
        return scored, answers, await teacher.report()
    finally:
        await teacher.shutdown()


@pytest.fixture(scope="module")
def seen() -> Any:
    return asyncio.run(scenario())


@pytest.fixture(scope="module")
def tables() -> list[Any]:
    import torch
    from transformers import AutoModelForCausalLM

    path = QUICKSTART / "models" / "teacher-sort"
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return [reference_logprobs(model, r.prompt.token_ids, r.response_ids) for r in rollouts()[1:]]


def test_samples_come_back_in_order(seen: Any) -> None:
    assert [sample.rollout.uid for sample in seen[0]] == [r.uid for r in rollouts()]


def test_scores_cover_the_response_positions_only(seen: Any) -> None:
    assert [sample.scores.logprobs.shape for sample in seen[0]] == [(r, K) for r in range(8)]


def test_the_sampled_token_has_the_log_probability_transformers_gives_it(
    seen: Any, tables: list[Any]
) -> None:
    for sample, table in zip(seen[0][1:], tables, strict=True):
        own = table[np.arange(len(table)), sample.rollout.response_ids]
        np.testing.assert_allclose(sample.scores.sampled_logprobs, own, atol=1e-4)


def test_the_top_k_are_the_k_most_probable_tokens(seen: Any, tables: list[Any]) -> None:
    for sample, table in zip(seen[0][1:], tables, strict=True):
        best = np.sort(table, axis=-1)[:, ::-1][:, :K]
        np.testing.assert_allclose(sample.scores.logprobs, best, atol=1e-4)


def test_the_top_k_ids_have_these_log_probabilities(seen: Any, tables: list[Any]) -> None:
    for sample, table in zip(seen[0][1:], tables, strict=True):
        own = np.take_along_axis(table, sample.scores.ids.astype(np.int64), axis=-1)
        np.testing.assert_allclose(sample.scores.logprobs, own, atol=1e-4)


def test_the_teacher_answers_prompts_itself(seen: Any) -> None:
    assert [int(answer.response_ids[-1]) for answer in seen[1]] == [EOS[0]] * 4


def test_the_report_counts_tokens_of_prompts_and_responses(seen: Any) -> None:
    assert seen[2].counters["tokens"] == sum(r.tokens for r in rollouts())
