"""A real teacher engine that returns hidden states: against transformers, row by row.

One engine serves both kinds of score that need no head in it.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from tests.engines import EOS, QUICKSTART, kwargs, prompts, reference_logprobs

pytestmark = pytest.mark.engine

K = 5
TEACHER = QUICKSTART / "models" / "teacher-sort"
LIMIT = 128 - 11  # longest response after prompts of 12 tokens, at the model's limit


@dataclass
class Seen:
    """What the engine returned."""

    states: list[Any]
    samples: list[Any]
    error: str


def rollouts() -> list[Any]:
    """Responses of 0, 1, 2, … tokens and one at the model's limit, with a top-k of the student."""
    from async_opd.core.samples import Rollout, VersionSpan

    made = []
    rng = np.random.default_rng(0)
    for length, prompt in zip((0, 1, 2, 3, 7, LIMIT), prompts(6), strict=True):
        ids = rng.integers(10, 60, length).astype(np.int32)
        spans = (VersionSpan(0, 0, length),) if length else ()
        topk = np.argsort(rng.random((length, 128)), axis=-1)[:, :K].astype(np.int32)
        zeros = np.zeros(length, np.float32)
        made.append(Rollout(f"{prompt.uid}/0", prompt, ids, zeros, spans, "stop", topk))
    return made


async def scenario() -> Seen:
    from async_opd.core.batch import Batch, unpack_samples
    from async_opd.core.errors import StageError
    from async_opd.core.stages import SamplingSpec
    from teachers.hidden import States
    from teachers.replica import TeacherReplica
    from teachers.spec import TeacherEngineSpec

    spec = TeacherEngineSpec("teacher sort/0", kwargs(TEACHER), "student_topk", K, EOS)
    teacher = TeacherReplica(spec)
    try:
        await teacher.ready()
        samples = unpack_samples([await teacher.score(Batch.pack(rollouts()))])
        hidden = States(spec, teacher._engine)
        states = [await hidden.score(rollout, f"h{rollout.uid}") for rollout in rollouts()]
        error = ""
        try:
            await teacher.generate(prompts(1), SamplingSpec(8, 0.0, 1.0, 1))
        except StageError as caught:
            error = str(caught)
        return Seen(states, samples, error)
    finally:
        await teacher.shutdown()


@pytest.fixture(scope="module")
def seen() -> Seen:
    return asyncio.run(scenario())


def model(name: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(QUICKSTART / "models" / name, dtype=torch.float32)


@pytest.fixture(scope="module")
def tables() -> list[Any]:
    """Log-probabilities [R, V] of the teacher in transformers, float64."""
    teacher = model("teacher-sort")
    return [reference_logprobs(teacher, r.prompt.token_ids, r.response_ids) for r in rollouts()]


def teacher_logprobs(states: Any) -> Any:
    """Log-probabilities [R, V] of hidden states, by the head from the teacher's files, float64."""
    import torch

    from async_opd.core.head_files import HeadFiles
    from teachers.head import Head

    logits = Head(HeadFiles.read(TEACHER), torch.float32).logits(torch.from_numpy(states.states))
    return logits.double().log_softmax(-1).numpy()


def test_states_cover_the_response_positions_only(seen: Seen) -> None:
    assert [s.states.shape for s in seen.states] == [(r, 128) for r in (0, 1, 2, 3, 7, LIMIT)]


def test_states_have_the_models_own_precision(seen: Seen) -> None:
    assert {(s.dtype, s.states.dtype) for s in seen.states} == {("float32", np.dtype("float32"))}


def test_states_times_the_head_are_the_log_probabilities_of_transformers(
    seen: Seen, tables: list[Any]
) -> None:
    for states, table in zip(seen.states, tables, strict=True):
        np.testing.assert_allclose(teacher_logprobs(states), table, atol=1e-4)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
def test_the_full_vocabulary_divergence_is_that_of_the_transformers_teacher(
    seen: Seen, tables: list[Any], direction: str
) -> None:
    student = model("student")
    for rollout, states, p in zip(rollouts(), seen.states, tables, strict=True):
        q = reference_logprobs(student, rollout.prompt.token_ids, rollout.response_ids)
        mine = teacher_logprobs(states)
        if direction == "forward":
            found, wanted = kl(mine, q), kl(p, q)
        else:
            found, wanted = kl(q, mine), kl(q, p)
        np.testing.assert_allclose(found, wanted, atol=1e-4)


def kl(p: Any, q: Any) -> Any:
    """KL(p ‖ q) of each row."""
    return (np.exp(p) * (p - q)).sum(-1)


def test_the_students_top_k_has_the_log_probabilities_of_transformers(
    seen: Seen, tables: list[Any]
) -> None:
    for rollout, sample, table in zip(rollouts(), seen.samples, tables, strict=True):
        own = np.take_along_axis(table, rollout.topk_ids.astype(np.int64), axis=-1)
        np.testing.assert_allclose(sample.scores.logprobs, own, atol=1e-4)


def test_the_sampled_token_is_scored_beside_them(seen: Seen, tables: list[Any]) -> None:
    for rollout, sample, table in zip(rollouts(), seen.samples, tables, strict=True):
        own = table[np.arange(len(table)), rollout.response_ids]
        np.testing.assert_allclose(sample.scores.sampled_logprobs, own, atol=1e-4)


def test_the_ids_come_back_as_the_student_gave_them(seen: Seen) -> None:
    for rollout, sample in zip(rollouts(), seen.samples, strict=True):
        np.testing.assert_array_equal(sample.scores.ids, rollout.topk_ids)


def test_the_ids_travel_in_the_scores_only(seen: Seen) -> None:
    assert {sample.rollout.topk_ids for sample in seen.samples} == {None}


def test_such_an_engine_says_that_it_cannot_answer(seen: Seen) -> None:
    assert seen.error == "teacher sort/0: an engine that returns hidden states cannot answer"
