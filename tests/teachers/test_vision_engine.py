"""A real engine of a VLM teacher: every kind of score behind prompts with images."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import RolloutFault
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.stages import SamplingSpec
from async_opd.media.cache import MediaCache
from tests.sequences import Parts, sequence
from tests.vision_models import EOS, FAMILIES
from tests.vision_prompts import PROMPTS, Fetches, Transformers, prompt_of, vision_kwargs

pytest.importorskip("torchvision")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("engines_fork"),
    pytest.mark.asyncio(loop_scope="module"),
]

K = 5
BOUND = 1e-3
PARTS: Parts = [("student", 3), ("tool", 2), ("student", 20)]
KINDS = ("sampled", "teacher_topk", "student_topk", "hidden")


@dataclass
class Seen:
    """A teacher, rollouts of it, and its scores of each kind."""

    reference: Transformers
    rollouts: list[Rollout]
    samples: dict[str, list[Sample]]
    answers: list[Rollout]
    fault: str

    def expanded(self, rollout: Rollout) -> Rollout:
        """The rollout behind the teacher's own prompt."""
        seen = rollout.for_teacher
        return seen.after(replace(seen.prompt, token_ids=self.reference.expanded(seen.prompt)))

    def tables(self) -> list[Any]:
        """Log-probabilities [R, V] of each rollout in transformers, float64."""
        return [self.reference.logprobs(self.expanded(one)) for one in self.rollouts]


def rollouts(placeholder: int) -> list[Rollout]:
    """For each prompt two rollouts that begin alike, as a student with larger images has them."""
    made = []
    for at, name in enumerate(PROMPTS):
        short = prompt_of(name, placeholder)
        wider = np.repeat(short.token_ids, np.where(short.token_ids == placeholder, 9, 1))
        prompt = replace(
            short, token_ids=wider, teacher_ids=short.token_ids if short.media else None
        )
        plain = sequence(f"{name}/0", PARTS, prompt=1, vocabulary=60, top_k=K, seed=at)
        ids = np.where(plain.continuation < 12, 12, plain.continuation).astype(np.int32)
        first = replace(plain, continuation=ids).after(prompt)
        first = replace(first, prompt=prompt, media=())
        other = ids.copy()
        other[-3:] = 61, 62, 63
        made += [first, replace(first, uid=f"{name}/1", continuation=other)]
    return made


async def scenario(folder: Path) -> Seen:
    from teachers.replica import TeacherReplica
    from teachers.scoring import RequestScoring
    from teachers.spec import TeacherEngineSpec

    reference = Transformers(folder)
    media = MediaCache(Fetches(), 1 << 20)
    spec = TeacherEngineSpec("teacher see/0", vision_kwargs(folder), "teacher_topk", K, (EOS,))
    teacher = TeacherReplica(spec, media)
    asked = rollouts(reference.processor.placeholder_id)
    try:
        await teacher.ready()
        samples = {"teacher_topk": unpack(Sample, [await teacher.score(Batch.pack(asked))])}
        for kind in ("sampled", "student_topk", "hidden"):
            scoring = RequestScoring(replace(spec, kind=kind), teacher._engine, media)
            samples[kind] = [
                Sample(one, await scoring.score(one.for_teacher, f"{kind} {one.uid}"))
                for one in asked
            ]
        prompts: list[Prompt] = [prompt_of(n, reference.processor.placeholder_id) for n in PROMPTS]
        answers = await teacher.generate(prompts, SamplingSpec(6, 0.0, 1.0, 1))
        with pytest.raises(RolloutFault) as raised:
            await teacher.generate([replace(prompts[1], media=())], SamplingSpec(6, 0.0, 1.0, 1))
        return Seen(reference, asked, samples, answers, str(raised.value))
    finally:
        await teacher.shutdown()


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["qwen2_5_vl", "llava"])
async def seen(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Seen]:
    yield await scenario(FAMILIES[request.param](tmp_path_factory.mktemp("teacher")))


def sampled(seen: Seen) -> list[Any]:
    """Log-probabilities of the sampled tokens in transformers."""
    return [
        table[np.arange(len(table)), rollout.response_ids]
        for rollout, table in zip(seen.rollouts, seen.tables(), strict=True)
    ]


async def test_sampled_tokens_have_the_log_probabilities_of_transformers(seen: Seen) -> None:
    for sample, expected in zip(seen.samples["sampled"], sampled(seen), strict=True):
        scores: Any = sample.scores
        assert np.abs(scores.logprobs - expected).max() < BOUND


@pytest.mark.parametrize("kind", ["teacher_topk", "student_topk"])
async def test_the_best_tokens_are_scored_as_by_transformers(seen: Seen, kind: str) -> None:
    for sample, table in zip(seen.samples[kind], seen.tables(), strict=True):
        scores: Any = sample.scores
        named = np.take_along_axis(table, scores.ids, axis=1)
        assert np.abs(scores.logprobs - named).max() < BOUND
        if kind == "teacher_topk":
            best = np.sort(table, axis=1)[:, ::-1][:, :K]
            assert np.abs(scores.logprobs - best).max() < BOUND


async def test_hidden_states_behind_images_give_the_whole_distribution(seen: Seen) -> None:
    import torch

    head = seen.reference.model.get_output_embeddings().weight.detach()
    for sample, table in zip(seen.samples["hidden"], seen.tables(), strict=True):
        scores: Any = sample.scores
        logits = torch.from_numpy(scores.states) @ head.T
        assert np.abs(logits.double().log_softmax(-1).numpy() - table).max() < BOUND


async def test_a_teacher_answers_prompts_with_images(seen: Seen) -> None:
    assert [one.prompt.uid for one in seen.answers] == list(PROMPTS)
    never = seen.reference.processor.unsampled_ids
    assert not any(np.isin(one.response_ids, never).any() for one in seen.answers)


async def test_a_teachers_answer_is_the_most_probable_of_transformers(seen: Seen) -> None:
    for one in seen.answers:
        prompt = replace(one.prompt, token_ids=seen.reference.expanded(one.prompt))
        never = seen.reference.processor.unsampled_ids
        table = seen.reference.logprobs(one.after(prompt), never)
        assert table.argmax(axis=1).tolist() == one.response_ids.tolist()


async def test_a_placeholder_without_its_image_is_never_computed(seen: Seen) -> None:
    assert "has 1 placeholders for 0 images" in seen.fault
