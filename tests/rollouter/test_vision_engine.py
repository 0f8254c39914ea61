"""A real engine of a VLM student: groups with images, log-probabilities, new weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch

from async_opd.config.sections.train import TrainConfig
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import WrongWeights
from async_opd.core.row import Media
from async_opd.core.samples import DeadLetter, Group, Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.media.cache import MediaCache
from async_opd.weight_sync.freshness import Evidence, Freshness
from async_opd.weight_sync.layout import Reference, WeightMeta
from tests.vision_models import EOS, qwen3_vl
from tests.vision_prompts import PROMPTS, Fetches, Transformers, prompt_of, vision_kwargs
from trainer.rank import Rank
from trainer.student.placed import PlacedStudent
from trainer.student.reference import rows_to_hold
from trainer.vision.images import Sight

pytest.importorskip("torchvision")
pytestmark = [
    pytest.mark.engine,
    pytest.mark.usefixtures("engines_fork"),
    pytest.mark.asyncio(loop_scope="module"),
]

N = 4
BOUND = 1e-3
TOWER = "visual"


@dataclass
class Seen:
    """The engine's results."""

    reference: Transformers
    fetches: Fetches
    rendered: int
    rollouts: list[Rollout]
    lost: dict[str, str]
    answers: list[Rollout]
    before: list[float] = field(default_factory=list)
    after: list[float] = field(default_factory=list)
    held: list[tuple[Reference, Evidence]] = field(default_factory=list)
    """Trainer's and engine's results for held rows: before a sync, after it, and after one without
    the tower."""
    frozen: list[tuple[WeightMeta, Evidence]] = field(default_factory=list)
    """Three syncs in turn without the tower, and what the engine has after each."""


def differences(reference: Transformers, rollouts: list[Rollout]) -> list[float]:
    """Of each rollout the largest difference from transformers."""
    found = []
    for rollout in rollouts:
        table = reference.logprobs(rollout, reference.processor.unsampled_ids)
        own = table[np.arange(len(table)), rollout.response_ids]
        found.append(float(np.abs(own - rollout.rollout_logprobs).max(initial=0.0)))
    return found


class World:
    """A replica, its queue, and the weights in transformers."""

    def __init__(self, folder: Path) -> None:
        from async_opd.queue.message_queue import MessageQueue
        from async_opd.weight_sync.coordinator import BroadcastSync
        from rollouter.replica import StudentReplica
        from rollouter.spec import StudentEngineSpec
        from rollouter.stage import RollouterStage
        from rollouter.transports.gloo import GlooSender
        from tests.rollouter.test_student_engine import Sender
        from trainer.publisher import Publisher

        self.reference, self.frozen = Transformers(folder), False
        self.queue = MessageQueue(("prompts", "rollouts/see", "dead"), 1000, 1 << 30, 60.0)
        self.fetches = Fetches()
        spec = StudentEngineSpec(
            "student/0", vision_kwargs(folder), SamplingSpec(8, 1.0, 1.0, N), (EOS,), "gloo"
        )
        self.replica = StudentReplica(spec, self.queue, MediaCache(self.fetches, 1 << 20))
        self.publisher = publisher = Publisher(
            lambda: iter([(n, p.detach().clone()) for n, p in self.sent()]),
            lambda: GlooSender("127.0.0.1", 30.0, 100_000),
            digests=True,
        )
        members = RollouterStage({"student/0": self.replica}, self.queue).members
        self.sync = BroadcastSync(Sender(publisher), members, [1], on_sync="keep", timeout_s=60.0)
        renderer = self.replica._engine.renderer
        render, self.rendered = renderer.render_cmpl_async, 0

        async def counted(*args: Any, **options: Any) -> Any:
            self.rendered += 1
            return await render(*args, **options)

        renderer.render_cmpl_async = counted

    def prompt(self, name: str) -> Prompt:
        return prompt_of(name, self.reference.processor.placeholder_id)

    async def rollouts(self) -> list[Rollout]:
        """A group of each prompt, of text and of images at the same time."""
        groups = [Group(self.prompt(name), tuple(range(N))) for name in PROMPTS]
        await self.queue.put("prompts", Batch.pack(groups))
        count = N * len(groups)
        lease = await self.queue.get("rollouts/see", count, count)
        await self.queue.ack("rollouts/see", lease.id)
        return unpack(Rollout, lease.batches)

    async def lost(self) -> dict[str, str]:
        """The outcome of prompts that no engine may compute."""
        one = self.prompt("one")
        absent = Media("0" * 64, 10, 8, 8)
        bad = [
            replace(one, uid="without", media=()),
            replace(one, uid="too many", media=one.media * 2),
            replace(one, uid="absent", media=(absent,)),
            replace(
                one, uid="three", media=one.media * 3, token_ids=np.repeat(one.token_ids[:1], 3)
            ),
        ]
        await self.queue.put("prompts", Batch.pack(Group(p, (0,)) for p in bad))
        lease = await self.queue.get("dead", len(bad), len(bad))
        return {one.header.uid: one.reason for one in unpack(DeadLetter, lease.batches)}

    async def push(self, version: int) -> None:
        await self.sync.snapshot(version)
        await self.sync.push()

    async def compare(self) -> tuple[Reference, Evidence]:
        """Held rows as the trainer and the engine compute them."""
        from rollouter.engine import held_logprobs, rounding_of
        from trainer.losses import ForwardKL, Objective, OnTopK

        model, cpu = self.reference.model, torch.device("cpu")
        rank = Rank(
            PlacedStudent(model, Objective(OnTopK(ForwardKL(), "ignore", None)), TrainConfig(), cpu)
        )
        rank.student.sight = Sight(lambda: self.reference.processor, model.base_model, cpu)
        rows = rows_to_hold(model.config.text_config.vocab_size, 200, rank.student.sight)
        engine, number = self.replica._engine, self.replica._syncs
        logprobs = await held_logprobs(engine, rows, number, self.replica._prompts)
        evidence = Evidence(logprobs, ({},), rounding_of(engine.vllm_config))
        return rank.student.reference(rows), evidence

    async def compare_frozen(self) -> tuple[WeightMeta, Evidence]:
        """The sync of a student whose tower is frozen, and what the engine has after it."""
        reference, _ = await self.compare()
        evidence = await self.replica.evidence(reference.rows)
        tower = tuple(n for n, _ in self.reference.model.named_parameters() if TOWER in n)
        return replace(self.publisher.meta, reference=reference, frozen=tower), evidence

    def sent(self) -> Iterator[tuple[str, Any]]:
        """The parameters of a weight sync: all of them, or all but a frozen tower's."""
        for name, parameter in self.reference.model.named_parameters():
            if not (self.frozen and TOWER in name):
                yield name, parameter

    def move(self, tower: bool, size: float) -> None:
        """Changes the weights of the tower alone, or all others."""
        torch.manual_seed(0)
        with torch.no_grad():
            for name, parameter in self.reference.model.named_parameters():
                if (TOWER in name) == tower:
                    parameter.add_(torch.randn_like(parameter) * size)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seen(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Seen]:
    world = World(qwen3_vl(tmp_path_factory.mktemp("student")))
    try:
        yield await scenario(world)
    finally:
        await world.replica.shutdown()


async def scenario(w: World) -> Seen:
    await w.replica.ready()
    await w.sync.connect()
    worker = asyncio.create_task(w.replica.run())
    async with asyncio.timeout(120):
        rollouts = await w.rollouts()
        found = Seen(w.reference, w.fetches, w.rendered, rollouts, {}, [])
        found.before = differences(w.reference, rollouts)
        found.lost = await w.lost()
        found.answers = await w.replica.generate(
            [w.prompt(name) for name in PROMPTS], SamplingSpec(8, 0.0, 1.0, 1)
        )
        found.held.append(await w.compare())
        w.move(tower=True, size=0.1)
        await w.push(1)
        found.held.append(await w.compare())
        found.after = differences(w.reference, await w.rollouts())
        w.frozen = True
        w.move(tower=False, size=0.01)
        await w.push(2)
        found.held.append(await w.compare())
        found.frozen.append(await w.compare_frozen())
        for version in (3, 4):
            w.move(tower=False, size=0.01)
            await w.push(version)
            found.frozen.append(await w.compare_frozen())
    worker.cancel()
    return found


async def test_a_group_with_images_is_answered_as_often_as_asked(seen: Seen) -> None:
    uids = sorted(f"{name}/{index}" for name in PROMPTS for index in range(N))
    assert sorted(rollout.uid for rollout in seen.rollouts) == uids


async def test_a_rollouts_prompt_has_the_ids_of_the_processor(seen: Seen) -> None:
    placeholder = seen.reference.processor.placeholder_id
    for rollout in seen.rollouts:
        short = prompt_of(rollout.prompt.uid, placeholder)
        assert rollout.prompt.token_ids.tolist() == seen.reference.expanded(short).tolist()
        if short.media:
            assert rollout.for_teacher.prompt.token_ids.tolist() == short.token_ids.tolist()
            assert rollout.for_teacher.continuation is rollout.continuation


async def test_log_probabilities_of_rollouts_agree_with_transformers(seen: Seen) -> None:
    assert max(seen.before) < BOUND


async def test_after_a_sync_of_the_tower_nothing_of_the_old_one_is_computed(seen: Seen) -> None:
    assert max(seen.after) < BOUND


def judged(reference: Reference, *evidence: Evidence) -> dict[int, WrongWeights]:
    """The replicas with wrong weights, by the log-probabilities of held rows alone."""
    meta = WeightMeta((), (), (), (), reference=reference)
    return Freshness(1).judge(meta, dict(enumerate(evidence))).wrong


@pytest.mark.parametrize("sync", [0, 1, 2], ids=["none", "all", "all but a frozen tower"])
async def test_held_rows_with_an_image_are_those_of_the_trainer(seen: Seen, sync: int) -> None:
    reference, evidence = seen.held[sync]
    assert [bool(row.media) for row in reference.rows] == [*[False] * 5, True]
    found, exact = evidence.logprobs[-1], reference.logprobs[-1]
    np.testing.assert_allclose(found, exact, atol=BOUND)
    assert judged(reference, evidence) == {}


async def test_an_engine_that_ignores_a_new_tower_is_found(seen: Seen) -> None:
    (before, old), (after, new), _ = seen.held
    for one, two in list(zip(before.logprobs, after.logprobs, strict=True))[:-1]:
        np.testing.assert_allclose(one, two, atol=1e-6)
    assert list(judged(after, new, old)) == [1]


async def test_a_frozen_tower_is_fresh_at_every_comparison(seen: Seen) -> None:
    freshness = Freshness(1)
    for meta, evidence in seen.frozen:
        assert freshness.judge(meta, {0: evidence}).wrong == {}


async def test_a_tower_that_stays_and_is_not_configured_as_frozen_is_found(seen: Seen) -> None:
    freshness, wrong = Freshness(1), dict[int, WrongWeights]()
    for meta, evidence in seen.frozen:
        wrong = freshness.judge(replace(meta, frozen=()), {0: evidence}).wrong
    assert f"{TOWER}.blocks.0.attn" in str(wrong[0])


async def test_no_rollout_has_a_token_that_stands_for_an_image(seen: Seen) -> None:
    never = seen.reference.processor.unsampled_ids
    assert not any(np.isin(rollout.response_ids, never).any() for rollout in seen.rollouts)


async def test_a_prompt_is_rendered_once_and_an_image_fetched_once(seen: Seen) -> None:
    assert seen.rendered == sum(bool(images) for _, images in PROMPTS.values())
    fetched = [one for hashes in seen.fetches.asked for one in hashes if one != "0" * 64]
    assert len(fetched) == len(set(fetched)) == 2


@pytest.mark.parametrize(
    ("uid", "said"),
    [
        ("without", "has 1 placeholders for 0 images"),
        ("too many", "has 1 placeholders for 2 images"),
        ("absent", "is not held by the queue"),
        ("three", "At most 2 image(s)"),
    ],
)
async def test_a_prompt_of_broken_images_is_a_dead_letter(seen: Seen, uid: str, said: str) -> None:
    assert said in seen.lost[f"{uid}/0"]


async def test_an_evaluation_answers_prompts_with_images_in_order(seen: Seen) -> None:
    assert [one.prompt.uid for one in seen.answers] == list(PROMPTS)
    placeholder = seen.reference.processor.placeholder_id
    for one in seen.answers:
        expected = seen.reference.expanded(prompt_of(one.prompt.uid, placeholder))
        assert len(one.prompt.token_ids) == len(expected)
