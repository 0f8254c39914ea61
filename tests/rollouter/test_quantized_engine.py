"""A real engine that quantizes its weights online: they are quantized again at every sync."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from async_opd.weight_sync.parameters import PACKED, LearnedParameters, SentTensors
from tests.engines import EOS, QUICKSTART, kwargs, prompts, reference_logprobs
from tests.rollouter.test_student_engine import Sender, perturb

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engines_fork")]

STUDENT = QUICKSTART / "models" / "student"


@dataclass
class World:
    """A quantized engine, and the weights that are sent to it."""

    model: Any
    replica: Any
    sync: Any
    version: int = 0
    learned: LearnedParameters = field(default_factory=LearnedParameters)
    strange: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    digests: list[dict[str, str]] = field(default_factory=list)
    """Of the engine's parameters after each push, by name."""
    gaps: list[float] = field(default_factory=list)
    """Mean difference of log-probabilities to the model that was pushed, after each push."""

    async def push(self) -> None:
        self.version += 1
        await self.sync.snapshot(self.version)
        await self.sync.push()
        (found,) = (await self.replica.evidence(())).loaded
        self.digests.append(found)
        meta = self.sync.newest[1]
        sent = {**dict(zip(meta.names, meta.digests, strict=True)), **meta.quantized}
        places = {(0, name): digest for name, digest in found.items()}
        self.strange += self.learned.learn(places, SentTensors(sent))
        self.wrong += self.learned.wrong(places, sent)
        self.gaps.append(await self.gap(self.model))

    async def gap(self, model: Any) -> float:
        """Mean |log q - log mu| of tokens that the engine samples."""
        from async_opd.core.stages import SamplingSpec

        rollouts = await self.replica.generate(prompts(16), SamplingSpec(12, 1.0, 1.0, 1))
        gaps = []
        for rollout in rollouts:
            ids = rollout.prompt.token_ids, rollout.response_ids
            table = reference_logprobs(model, *ids)
            own = table[np.arange(len(table)), rollout.response_ids]
            gaps.append(np.abs(own - rollout.rollout_logprobs))
        return float(np.concatenate(gaps).mean())


@asynccontextmanager
async def world() -> AsyncIterator[World]:
    import torch
    from transformers import AutoModelForCausalLM

    from async_opd.core.stages import SamplingSpec
    from async_opd.queue.message_queue import MessageQueue
    from async_opd.weight_sync.coordinator import BroadcastSync
    from rollouter.replica import StudentReplica
    from rollouter.spec import StudentEngineSpec
    from rollouter.stage import RollouterStage
    from rollouter.transports.gloo import GlooSender
    from trainer.publisher import Publisher
    from trainer.student.quantization import parts_of

    model = AutoModelForCausalLM.from_pretrained(STUDENT, dtype=torch.float32)
    queue = MessageQueue(("prompts", "rollouts/sort", "dead"), 1000, 1 << 30, 60.0)
    engine = kwargs(STUDENT, quantization="fp8_per_channel")
    sampling = SamplingSpec(12, 1.0, 1.0, 1)
    replica = StudentReplica(StudentEngineSpec("student/0", engine, sampling, EOS, "gloo"), queue)
    publisher = Publisher(
        lambda: iter([(n, p.detach().bfloat16()) for n, p in model.named_parameters()]),
        lambda: GlooSender("127.0.0.1", 30.0, 100_000),
        digests=True,
        quantize=parts_of,
    )
    members = RollouterStage({"student/0": replica}, queue).members
    sync = BroadcastSync(Sender(publisher), members, [1], on_sync="keep", timeout_s=30.0)
    try:
        await replica.ready()
        await sync.connect()
        yield World(model, replica, sync)
    finally:
        await replica.shutdown()


@pytest.fixture(scope="module")
def seen() -> World:
    """Three pushes: the weights of the files, others, and those of the files again."""

    async def scenario() -> World:
        async with world() as made:
            first = copy.deepcopy(made.model.state_dict())
            await made.push()
            for name, parameter in made.model.named_parameters():
                if "layers." in name:
                    perturb(parameter)
            await made.push()
            made.model.load_state_dict(first)
            await made.push()
            return made

    return asyncio.run(scenario())


def matrices(digests: dict[str, str]) -> dict[str, str]:
    """The digests of the layers' matrices and scales, as kernels compute with them."""
    return {
        name: one
        for name, one in digests.items()
        if ".layers." in name and "," in one and not name.startswith(PACKED)
    }


def test_the_matrices_of_layers_are_float8_with_scales(seen: World) -> None:
    found = matrices(seen.digests[0])
    dtypes = Counter(one.partition("[")[0] for one in found.values())
    assert dtypes == {"float8_e4m3fn": 8, "float32": 8}


def test_a_sync_quantizes_all_of_them_again(seen: World) -> None:
    first, second, _ = map(matrices, seen.digests)
    assert first.keys() == second.keys()
    assert [name for name in first if first[name] == second[name]] == []


def test_the_same_weights_become_the_same_bits(seen: World) -> None:
    assert seen.digests[0] == seen.digests[2]


def test_all_of_them_are_those_that_the_trainer_quantizes_bit_by_bit(seen: World) -> None:
    assert {(0, name) for name in matrices(seen.digests[0])} <= seen.learned.sources.keys()
    assert (seen.strange, seen.wrong) == ([], [])


def test_probabilities_follow_the_weights_that_were_sent(seen: World) -> None:
    assert max(seen.gaps) < 0.2
