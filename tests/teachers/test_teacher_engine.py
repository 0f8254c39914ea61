"""A real teacher engine: every kind of score against transformers, row by row.

One engine serves all kinds, and answers prompts.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from tests.engines import EOS, QUICKSTART, kwargs, prompts
from tests.sequences import Parts, sampled_positions, sequence

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engines_fork")]

K = 5
WARM = 2.0
TEACHER = QUICKSTART / "models" / "teacher-sort"
LIMIT = 128 - 12  # longest response after prompts of 12 tokens, at the model's limit
LENGTHS = (0, 1, 2, 3, 7, LIMIT, LIMIT)
TURNS: Parts = [
    ("student", 2),
    ("tool", 3),
    ("student", 1),
    ("user", 4),
    ("student", 5),
    ("tool", 2),
]
SEGMENTS: Parts = [("student", 30), ("prompt", 50), ("student", 3), ("prompt", 1), ("student", 2)]
"""The second begins with the same tokens as the first: the prefix cache has its sampled ones."""
LONG: Parts = [("student", 3), ("tool", 70), ("student", 20), ("student", 4)]
"""Several blocks of the prefix cache lie between its spans."""


@dataclass
class Seen:
    """The engine's results."""

    samples: dict[str, list[Any]]
    answers: list[Any]
    tokens: float
    tokenizer: Any


def rollouts() -> list[Any]:
    """Responses of 0, 1, 2, … tokens and two at the model's limit, with a top-k of the student.

    Those two differ in their last tokens only: the second can be read from the prefix cache. Then
    sequences of several spans; the last two also differ in their last tokens only.
    """
    from async_opd.core.samples import Rollout, VersionSpan

    made: list[Any] = []
    rng = np.random.default_rng(0)
    for length, prompt in zip(LENGTHS, prompts(len(LENGTHS)), strict=True):
        ids = rng.integers(10, 60, length).astype(np.int32)
        spans = (VersionSpan(0, 0, length),) if length else ()
        topk = np.argsort(rng.random((length, 128)), axis=-1)[:, :K].astype(np.int32)
        zeros = np.zeros(length, np.float32)
        made.append(Rollout.plain(f"{prompt.uid}/0", prompt, ids, zeros, spans, "stop", topk))
    ids = made[-2].response_ids.copy()
    ids[-3:] = 61, 62, 63
    made[-1] = replace(made[-2], uid=f"{made[-2].prompt.uid}/1", continuation=ids)
    made.append(sequence("turns/0", TURNS, prompt=1, vocabulary=60, top_k=K))
    long = sequence("long/0", LONG, prompt=12, vocabulary=60, top_k=K, seed=1, media=False)
    ids = long.continuation.copy()
    ids[-3:] = 61, 62, 63
    made += [long, replace(long, uid="long/1", continuation=ids)]
    segments = sequence("segments/0", SEGMENTS, prompt=12, vocabulary=60, top_k=K, seed=2)
    ids = segments.continuation.copy()
    ids[30:72] = segments.token_ids[:42]
    return [*made, replace(segments, continuation=ids, media=())]


async def scored(scoring: Any) -> list[Any]:
    """The samples of the rollouts, whose segments are requests with their own ids."""
    from async_opd.core.samples import Sample
    from teachers.segments import score_segments

    ids = (f"{id(scoring)} {number}" for number in itertools.count())
    one = lambda segment: scoring.score(segment, next(ids))  # noqa: E731
    return [Sample(r, await score_segments("t", r, one)) for r in rollouts()]


async def scenario() -> Seen:
    from async_opd.core.batch import Batch, unpack
    from async_opd.core.samples import Sample
    from async_opd.core.stages import SamplingSpec
    from teachers.replica import TeacherReplica
    from teachers.scoring import RequestScoring
    from teachers.spec import TeacherEngineSpec

    spec = TeacherEngineSpec("teacher sort/0", kwargs(TEACHER), "teacher_topk", K, EOS)
    teacher = TeacherReplica(spec)
    try:
        await teacher.ready()
        samples = {"teacher_topk": unpack(Sample, [await teacher.score(Batch.pack(rollouts()))])}
        tokens = (await teacher.report()).counters["tokens"]
        for kind in ("sampled", "student_topk", "hidden"):
            scoring = RequestScoring(replace(spec, kind=kind), teacher._engine)
            samples[kind] = await scored(scoring)
        samples["warm"] = await scored(
            RequestScoring(replace(spec, temperature=WARM), teacher._engine)
        )
        answers = await teacher.generate(prompts(4), SamplingSpec(8, 0.0, 1.0, 1))
        scoring_now = asyncio.create_task(teacher.score(Batch.pack(rollouts())))
        await teacher.load(str(QUICKSTART / "models" / "teacher-reverse"))
        await scoring_now
        reloaded = unpack(Sample, [await teacher.score(Batch.pack(rollouts()))])
        tokenizer = teacher._engine.tokenizer
        return Seen(
            samples=samples | {"reloaded": reloaded},
            answers=answers,
            tokens=tokens,
            tokenizer=tokenizer,
        )
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
    return tables_of("teacher-sort")


def tables_of(name: str) -> list[Any]:
    """Log-probabilities [R, V] of the teacher in transformers, float64."""
    teacher = model(name)
    return [table_of(teacher, rollout) for rollout in rollouts()]


def table_of(model: Any, rollout: Any) -> Any:
    """Log-probabilities [R, V] of a transformers model at the sampled positions, float64."""
    import torch

    each = [torch.from_numpy(rollout.token_ids[slice(*one)]).long() for one in rollout.segments]
    with torch.no_grad():
        logits = torch.cat([model(ids[None]).logits[0] for ids in each]).double()
    rows = [at - 1 for at in sampled_positions(rollout)]
    return logits[rows].log_softmax(-1).numpy()


@pytest.mark.parametrize("kind", ["sampled", "teacher_topk", "student_topk"])
def test_the_sampled_token_is_scored_as_by_transformers(
    seen: Seen, tables: list[Any], kind: str
) -> None:
    name = "logprobs" if kind == "sampled" else "sampled_logprobs"
    for sample, table in zip(seen.samples[kind], tables, strict=True):
        own = table[np.arange(len(table)), sample.rollout.response_ids]
        np.testing.assert_allclose(getattr(sample.scores, name), own, atol=1e-4)


def test_the_top_k_are_the_k_most_probable_tokens(seen: Seen, tables: list[Any]) -> None:
    for sample, table in zip(seen.samples["teacher_topk"], tables, strict=True):
        best = np.sort(table, axis=-1)[:, ::-1][:, :K]
        np.testing.assert_allclose(sample.scores.logprobs, best, atol=1e-4)


@pytest.mark.parametrize("kind", ["teacher_topk", "student_topk"])
def test_ids_and_rest_have_these_log_probabilities(
    seen: Seen, tables: list[Any], kind: str
) -> None:
    for sample, table in zip(seen.samples[kind], tables, strict=True):
        ids, outside = sample.scores.ids.astype(np.int64), np.exp(table)
        own = np.take_along_axis(table, ids, axis=-1)
        np.testing.assert_allclose(sample.scores.logprobs, own, atol=1e-4)
        np.put_along_axis(outside, ids, 0.0, axis=-1)
        rest = np.log(outside.sum(-1))
        np.testing.assert_allclose(sample.scores.rest_logprobs, rest, rtol=1e-5, atol=1e-4)


def test_a_tempered_teachers_scores_are_those_of_its_logits(seen: Seen, tables: list[Any]) -> None:
    for sample, table in zip(seen.samples["warm"], tables, strict=True):
        p = np.exp(table / WARM)
        warm = np.log(p / p.sum(-1, keepdims=True))
        own = np.take_along_axis(warm, sample.scores.ids.astype(np.int64), axis=-1)
        np.testing.assert_allclose(sample.scores.logprobs, own, atol=1e-4)


def test_samples_come_back_in_order_without_the_students_ids(seen: Seen) -> None:
    found = seen.samples["teacher_topk"]
    assert [sample.rollout.uid for sample in found] == [rollout.uid for rollout in rollouts()]
    assert {sample.rollout.topk_ids for sample in found} == {None}
    for rollout, sample in zip(rollouts(), seen.samples["student_topk"], strict=True):
        np.testing.assert_array_equal(sample.scores.ids, rollout.topk_ids)


def teacher_logprobs(states: Any) -> Any:
    """Log-probabilities [R, V] of hidden states, by the head as the trainer reads it."""
    import torch

    from trainer.losses.teacher_heads import read_head

    head = read_head("sort", str(TEACHER), torch.float32, 128, torch.device("cpu"))
    rows = torch.from_numpy(states.states)
    return head.logits(rows, torch.empty(len(rows), 128)).double().log_softmax(-1).numpy()


def test_states_times_the_head_are_those_of_transformers(seen: Seen, tables: list[Any]) -> None:
    for sample, table in zip(seen.samples["hidden"], tables, strict=True):
        assert sample.scores.states.shape == (len(table), 128)
        np.testing.assert_allclose(teacher_logprobs(sample.scores), table, atol=1e-4)


def test_the_teacher_answers_prompts_and_counts_tokens(seen: Seen) -> None:
    assert [int(answer.response_ids[-1]) for answer in seen.answers] == [EOS[0]] * 4
    assert seen.tokenizer is None
    assert seen.tokens == sum(rollout.tokens for rollout in rollouts())


def test_after_new_weights_were_loaded_the_scores_are_theirs(seen: Seen) -> None:
    for sample, table in zip(seen.samples["reloaded"], tables_of("teacher-reverse"), strict=True):
        own = np.take_along_axis(table, sample.scores.ids.astype(np.int64), axis=-1)
        np.testing.assert_allclose(sample.scores.logprobs, own, atol=1e-4)
