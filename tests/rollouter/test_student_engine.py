"""A real student engine: log-probabilities, versions, weight sync, requests in flight.

One scenario per model (tied and untied head); the tests state what it must have shown.
"""

from __future__ import annotations

import asyncio
import copy
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.config.registry import TRANSPORTS
from async_opd.core.errors import TransferAborted, WeightSyncError
from async_opd.core.samples import DeadLetter, Group, Prompt, Rollout
from async_opd.weight_sync.layout import chunk_plan
from tests.engines import EOS, QUICKSTART, kwargs, prompts, reference_logprobs

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engines_fork")]

K = 16
MODES = ("keep", "recompute", "finish")
MANY, AT_ONCE = 64, 8  # some are in flight whenever a sync comes


@dataclass
class Seen:
    """The measurements of a scenario."""

    before: float = 0.0
    tempered: float = 0.0
    cut: dict[str, list[TopK]] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    spans: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)
    in_flight_errors: dict[str, float] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    stopped: list[bool] = field(default_factory=list)
    after_a_pause: float = 0.0
    topk: list[TopK] = field(default_factory=list)
    without_topk: bool = False
    refused: dict[str, str] = field(default_factory=dict)  # uid -> reason
    broken_off: tuple[str, float] = ("", 1.0)
    made_again: float = 1.0
    by_tcp: float = 1.0
    by_shared_memory: float = 1.0
    mixed: tuple[str, str, bool] = ("", "", False)
    sent_again: float = 1.0
    evaluated: dict[str, list[tuple[Any, ...]]] = field(default_factory=dict)


@dataclass
class TopK:
    """A rollout with its own top-k, and transformers' log-probabilities [R, V] at its positions."""

    rollout: Any
    table: Any


def untied_copy(tmp: Path) -> Path:
    """The student with an untied head."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(QUICKSTART / "models" / "student")
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    shutil.copytree(QUICKSTART / "models" / "student", tmp / "untied")
    (tmp / "untied" / "model.safetensors").unlink()
    model.save_pretrained(tmp / "untied")
    return tmp / "untied"


class Sender:
    """A publisher in this process."""

    def __init__(self, publisher: Any) -> None:
        self.publisher = publisher

    async def open(self, group: int, world_size: int, connected: Any) -> Any:
        return self.publisher.open(group, world_size, connected)

    async def connect(self, group: int) -> None:
        await asyncio.to_thread(self.publisher.connect, group)

    async def snapshot(self, version: int, compare: bool = False) -> Any:
        return self.publisher.snapshot()

    async def send(self, group: int) -> float:
        return await asyncio.to_thread(self.publisher.send, group)


class World:
    """A student engine, its queue, and the same weights in transformers."""

    def __init__(self, path: Path, workers: int = 1) -> None:
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

        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.queue = MessageQueue(("prompts", "rollouts/sort", "dead"), 1000, 1 << 30, 60.0)
        self.sampling = SamplingSpec(12, 1.0, 1.0, 1)
        self.long = SamplingSpec(100, 1.0, 1.0, 1)  # so that some are in flight when a sync comes
        engine = kwargs(path, workers)
        spec = StudentEngineSpec(
            "student/0", engine, self.long, EOS, "gloo", concurrency=AT_ONCE, top_k=K
        )
        self.replica = StudentReplica(spec, self.queue)
        self.publisher = publisher = Publisher(
            lambda: iter([(n, p.detach().clone()) for n, p in self.model.named_parameters()]),
            lambda: GlooSender("127.0.0.1", 30.0, 100_000),
        )
        members = RollouterStage({"student/0": self.replica}, self.queue).members
        self.sync = BroadcastSync(
            Sender(publisher), members, [workers], on_sync="keep", timeout_s=30.0
        )
        self.version = 0
        self.on_sync = "keep"
        pause = self.replica.pause
        self.replica.pause = lambda _: pause(self.on_sync)

    async def push(self, on_sync: str = "keep") -> None:
        """A weight sync of the transformers model's weights."""
        self.version += 1
        self.on_sync = on_sync
        await self.sync.snapshot(self.version)
        await self.sync.push()

    async def push_that_breaks_off(self) -> str:
        """Its error; it sends the first chunk only, of other weights than the engine has."""
        from rollouter.transports.chunks import packed

        for parameter in self.model.parameters():
            perturb(parameter)
        transport: Any = self.publisher._transports[0]

        def first_chunk_only(weights: Any, meta: Any) -> None:
            (chunk, *_) = chunk_plan(meta.sizes, 100_000)
            transport.send(packed(weights, chunk), 30.0)
            transport.close()
            raise RuntimeError("broke off")

        transport.broadcast = first_chunk_only
        with pytest.raises(WeightSyncError) as raised:
            await self.push()
        return str(raised.value)

    async def transfer_that_breaks_off(self) -> tuple[str, float]:
        """Its error, and the engine's distance from its old weights. The new ones stay behind."""
        old = copy.deepcopy(self.model)
        words = await self.push_that_breaks_off()
        new, self.model = self.model, old
        distance = await self.error()
        self.model = new
        return words, distance

    async def load_that_breaks_off(self) -> tuple[str, str, bool]:
        """The errors of a transfer after whose first chunk, and of ``resume``; whether it stands.

        Its chunks are loaded when they come.
        """
        await self.through_another_transport("tests.rollouter.unstaged_transport")
        words = await self.push_that_breaks_off()
        with pytest.raises(TransferAborted) as raised:
            await self.replica.resume()
        return words, str(raised.value), await self.replica._engine.is_paused()

    async def through_another_transport(self, module: str) -> float:
        """The engine's distance from weights that came through a transport that a test has."""
        from rollouter.transports import transport

        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(TRANSPORTS, "tcp", module)
            made = transport("tcp")
        self.replica._transport = made
        self.publisher._new_transport = lambda: made.sender("127.0.0.1", 30.0, 100_000)
        for parameter in self.model.parameters():
            perturb(parameter)
        await self.sync.connect()
        await self.push()
        return await self.error()

    async def answer_that_arrives_during_a_sync(self) -> float:
        """Its distance from the new weights; blocks of its prompt are cached under the old."""
        ids = np.random.default_rng(0).integers(3, 100, size=80).astype(np.int32)
        prompt = [Prompt("long", "sort", "sort", ids)]
        await self.replica.generate(prompt, self.sampling)
        answers: list[asyncio.Task[Any]] = []
        receive = self.replica.receive

        async def asked_meanwhile(meta: Any) -> None:
            answers.append(asyncio.create_task(self.replica.generate(prompt, self.sampling)))
            await asyncio.sleep(0)
            await receive(meta)

        self.replica.receive = asked_meanwhile
        for parameter in self.model.parameters():
            perturb(parameter)
        await self.push()
        (rollout,) = await answers[0]
        return self.difference(rollout)

    async def topk(self) -> list[TopK]:
        """A queued group of every prompt, beside the reference."""
        from async_opd.core.batch import Batch, unpack

        await self.queue.put("prompts", Batch.pack(Group(p, (0, 1)) for p in prompts(4)))
        lease = await self.queue.get("rollouts/sort", 8, 8)
        await self.queue.ack("rollouts/sort", lease.id)
        rollouts = unpack(Rollout, lease.batches)
        return [
            TopK(r, reference_logprobs(self.model, r.prompt.token_ids, r.response_ids))
            for r in rollouts
        ]

    async def refused(self) -> dict[str, str]:
        """The outcome of prompts that are longer than the model, or have no such token."""
        from async_opd.core.batch import Batch, unpack

        wrong = {"long": np.full(5000, 5, np.int32), "foreign": np.array([10**6], np.int32)}
        groups = (Group(Prompt(uid, "sort", "sort", ids), (0,)) for uid, ids in wrong.items())
        await self.queue.put("prompts", Batch.pack(groups))
        lease = await self.queue.get("dead", 8, 2)
        return {lost.header.uid: lost.reason for lost in unpack(DeadLetter, lease.batches)}

    async def error(self) -> float:
        """Largest difference between the engine's log-probabilities and transformers'."""
        rollouts = await self.replica.generate(prompts(4), self.sampling)
        return max(self.difference(rollout) for rollout in rollouts)

    def beside(self, rollout: Any, temperature: float) -> TopK:
        """A rollout beside the reference at a temperature."""
        ids = rollout.prompt.token_ids, rollout.response_ids
        return TopK(rollout, reference_logprobs(self.model, *ids, temperature))

    def difference(self, rollout: Any, start: int = 0, temperature: float = 1.0) -> float:
        """The same for one rollout, from response token ``start`` on."""
        table = reference_logprobs(
            self.model, rollout.prompt.token_ids, rollout.response_ids, temperature
        )
        own = table[np.arange(len(table)), rollout.response_ids]
        return float(np.abs(own - rollout.rollout_logprobs)[start:].max(initial=0.0))


@asynccontextmanager
async def world(path: Path, workers: int = 1) -> AsyncIterator[World]:
    made = World(path, workers)
    try:
        await made.replica.ready()
        await made.sync.connect()
        yield made
    finally:
        await made.replica.shutdown()


def perturb(parameter: Any) -> None:
    """Moves a parameter enough that every log-probability changes."""
    import torch

    torch.manual_seed(0)
    with torch.no_grad():
        parameter.add_(torch.randn_like(parameter) * 0.1)


async def decoding(replica: Any) -> None:
    """Waits until some requests are in flight and have tokens already."""
    states = replica._engine.output_processor.request_states
    async with asyncio.timeout(60):
        while True:
            if any(state.detokenizer.num_output_tokens() for state in states.values()):
                return
            await asyncio.sleep(0)


async def scenario(path: Path) -> Seen:
    from async_opd.core.batch import Batch, unpack
    from async_opd.core.stages import SamplingSpec

    seen = Seen()
    async with world(path) as w:
        seen.before = await w.error()
        tempered = SamplingSpec(12, 0.5, 1.0, 1)
        cold = await w.replica.generate(prompts(4), tempered)
        seen.tempered = max(w.difference(rollout, temperature=0.5) for rollout in cold)
        for name, cut in {"top_k": {"top_k": 3}, "min_p": {"min_p": 0.2}}.items():
            hot = await w.replica.generate(prompts(4), SamplingSpec(12, 2.0, 1.0, 1, **cut))
            seen.cut[name] = [w.beside(rollout, 2.0) for rollout in hot]
        seen.stopped = [r.finish_reason == "stop" and r.response_ids[-1] in EOS for r in cold]
        many = await w.replica.generate(prompts(16), tempered)
        seen.order = [rollout.uid for rollout in many]
        seen.without_topk = all(rollout.topk_ids is None for rollout in many)
        worker = asyncio.create_task(w.replica.run())
        seen.topk = await w.topk()
        seen.refused = await asyncio.wait_for(w.refused(), 60)
        for name, parameter in w.model.named_parameters():
            family = name.split("layers.0.")[-1] if "layers.0." in name else name
            if "layers.1." in name:
                continue
            perturb(parameter)
            await w.push()
            seen.errors[family] = await w.error()
        for mode in MODES:
            await w.queue.put("prompts", Batch.pack(Group(p, (0,)) for p in prompts(MANY)))
            await decoding(w.replica)
            if mode != "recompute":
                perturb(w.model.model.norm.weight)  # changes no KV cache: logits belong to it alone
            await w.push(mode)
            lease = await w.queue.get("rollouts/sort", MANY, MANY)
            await w.queue.ack("rollouts/sort", lease.id)
            rollouts = unpack(Rollout, lease.batches)
            seen.spans[mode] = [rollout.version_spans for rollout in rollouts]
            newest = [r for r in rollouts if r.version_spans[-1].version == w.version]
            errors = [w.difference(r, start=r.version_spans[-1].start) for r in newest]
            seen.in_flight_errors[mode] = max(errors, default=0.0)
        for mode in ("keep", "finish"):
            asked = asyncio.create_task(w.replica.generate(prompts(MANY), w.long))
            await decoding(w.replica)
            await w.push(mode)
            seen.evaluated[mode] = [rollout.version_spans for rollout in await asked]
        worker.cancel()
        seen.broken_off = await w.transfer_that_breaks_off()
        await w.push()
        seen.made_again = await w.error()
        seen.after_a_pause = await w.answer_that_arrives_during_a_sync()
        seen.by_shared_memory = await w.through_another_transport(TRANSPORTS["shared_memory"])
        seen.by_tcp = await w.through_another_transport("tests.rollouter.tcp_transport")
        seen.mixed = await w.load_that_breaks_off()
        await w.push()
        seen.sent_again = await w.error()
    return seen


@pytest.fixture(scope="module", params=["tied", "untied"])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    path = QUICKSTART / "models" / "student"
    if request.param == "untied":
        path = untied_copy(tmp_path_factory.mktemp("models"))
    return asyncio.run(scenario(path))


def test_a_transfer_that_breaks_off_half_way_leaves_the_old_weights_generating(seen: Seen) -> None:
    words, distance = seen.broken_off
    assert "broke off" in words
    assert distance < 1e-4


@pytest.mark.parametrize(
    "when", ["made_again", "sent_again", "by_tcp", "by_shared_memory", "after_a_pause"]
)
def test_the_engine_has_the_weights_that_were_sent(seen: Seen, when: str) -> None:
    """After a broken transfer or load, by other transports, for a request during a sync."""
    assert getattr(seen, when) < 1e-4


def test_with_weights_of_two_versions_it_stays_paused(seen: Seen) -> None:
    transfer, resume, paused = seen.mixed
    assert "broke off" in transfer
    assert "it stays paused" in resume
    assert "some weights were replaced" in resume
    assert paused


def test_answers_to_an_evaluation_go_on_over_a_sync_and_name_both_versions(seen: Seen) -> None:
    assert any(len(spans) == 2 for spans in seen.evaluated["keep"])


def test_a_sync_that_waits_breaks_evaluations_off(seen: Seen) -> None:
    versions = {tuple(span.version for span in spans) for spans in seen.evaluated["finish"]}
    newest = max(versions)
    assert len(newest) == 1
    assert versions <= {newest, (newest[0] - 1,)}


def test_rollout_logprobs_are_those_of_transformers_at_any_temperature(seen: Seen) -> None:
    assert max(seen.before, seen.tempered) < 1e-4


@pytest.mark.parametrize("name", ["top_k", "min_p"])
def test_rollout_logprobs_are_those_of_what_a_cut_leaves(seen: Seen, name: str) -> None:
    """Of the 3 best at temperature 2, or of those at least a fifth as probable as the best."""
    for found in seen.cut[name]:
        table = found.table
        least = np.sort(table)[:, -3] if name == "top_k" else table.max(-1) + np.log(0.2)
        left = np.where(table >= least[:, None] - 1e-6, table, -np.inf)
        left -= np.log(np.exp(left).sum(-1, keepdims=True))
        own = left[np.arange(len(left)), found.rollout.response_ids]
        np.testing.assert_allclose(found.rollout.rollout_logprobs, own, atol=1e-4)


def test_the_students_top_k_are_its_k_most_probable_tokens(seen: Seen) -> None:
    """Beside them are the log-probabilities of the sampled tokens, nearly always among them."""
    held = []
    for found in seen.topk:
        rollout = found.rollout
        own = np.take_along_axis(found.table, rollout.topk_ids.astype(np.int64), axis=-1)
        best = np.sort(found.table, axis=-1)[:, ::-1][:, :K]
        np.testing.assert_allclose(own, best, atol=1e-4)
        sampled = found.table[np.arange(len(found.table)), rollout.response_ids]
        np.testing.assert_allclose(rollout.rollout_logprobs, sampled, atol=1e-4)
        held.append((rollout.topk_ids == rollout.response_ids[:, None]).any(axis=1))
    assert np.concatenate(held).mean() > 0.9


def test_answers_come_in_the_order_of_the_prompts(seen: Seen) -> None:
    assert seen.order == [f"sort{index}/0" for index in range(16)]
    assert seen.without_topk
    assert all(seen.stopped)


def test_every_parameter_family_arrives(seen: Seen) -> None:
    wanted = {"model.embed_tokens.weight", "model.norm.weight", "self_attn.q_norm.weight"}
    wanted |= {f"self_attn.{name}_proj.weight" for name in "qkvo"}
    wanted |= {f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert wanted <= set(seen.errors)
    assert {family: error for family, error in seen.errors.items() if error >= 1e-4} == {}


@pytest.mark.parametrize("mode", ["keep", "recompute"])
def test_rollouts_in_flight_go_on_under_the_new_version(seen: Seen, mode: str) -> None:
    assert any(len(spans) == 2 for spans in seen.spans[mode])
    assert seen.in_flight_errors[mode] < 1e-4  # of tokens after the sync


def test_finish_lets_every_rollout_end_on_its_version(seen: Seen) -> None:
    assert {len(spans) for spans in seen.spans["finish"]} == {1}


@pytest.mark.parametrize("mode", MODES)
def test_versions_of_a_rollout_follow_each_other(seen: Seen, mode: str) -> None:
    for spans in seen.spans[mode]:
        assert [b.version - a.version for a, b in pairwise(spans)] in ([], [1])


@dataclass
class Cramped:
    """An engine whose KV cache holds far fewer requests than ``max_num_seqs``."""

    limits: list[float] = field(default_factory=list)
    finished: int = 0


@pytest.fixture(scope="module")
def cramped() -> Cramped:
    from async_opd.core.batch import Batch
    from async_opd.core.stages import SamplingSpec
    from async_opd.queue.message_queue import MessageQueue
    from rollouter.replica import StudentReplica
    from rollouter.spec import StudentEngineSpec

    async def run() -> Cramped:
        seen = Cramped()
        queue = MessageQueue(("prompts", "rollouts/sort", "dead"), 1000, 1 << 30, 60.0)
        small = kwargs(QUICKSTART / "models" / "student") | {"kv_cache_memory_bytes": 3 << 19}
        sampling = SamplingSpec(60, 2.0, 1.0, 1)
        replica = StudentReplica(StudentEngineSpec("s", small, sampling, (), "gloo"), queue)
        try:
            await replica.ready()
            worker = asyncio.create_task(replica.run())
            await queue.put("prompts", Batch.pack(Group(p, (0,)) for p in prompts(160)))
            for _ in range(4):
                lease = await asyncio.wait_for(queue.get("rollouts/sort", 40, 40), 120)
                seen.finished += len(lease)
                seen.limits.append((await replica.report()).gauges["limit"])
            worker.cancel()
        finally:
            await replica.shutdown()
        return seen

    return asyncio.run(run())


def test_requests_in_flight_follow_a_small_kv_cache_which_loses_nothing(cramped: Cramped) -> None:
    assert max(cramped.limits) < 40 < 64
    assert cramped.finished == 160


def test_prompts_that_the_engine_refuses_are_dead_letters_and_it_goes_on(seen: Seen) -> None:
    assert sorted(seen.refused) == ["foreign/0", "long/0"]
    assert all("the engine refuses" in reason for reason in seen.refused.values())
