"""Rollouts scored in pieces: whatever becomes of the pieces, the scores are those of the whole.

The real replicas, pool and stage; the engine is made up: each row is a function of all tokens
before it, and it has a prefix cache that hides rows as the real one does.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tests.engines  # noqa: F401 - the environment, before vllm is imported
from async_opd.core.batch import Batch, unpack_samples
from async_opd.core.config import HealthConfig
from async_opd.core.queue import MessageQueue
from async_opd.core.samples import Piece, Rollout, Sample
from async_opd.core.stages import SCORED, early_topic, rollouts_topic, topics
from teachers.pool import TeacherPool
from teachers.scorer import ScorerStage
from tests.conftest import make_rollout
from tests.teachers.test_pool import settle

pytestmark = pytest.mark.engine

BLOCK, K, STATES, VOCABULARY = 4, 2, 3, 50
KINDS = ("sampled", "teacher_topk", "student_topk", "hidden")


class Engine:
    """Answers as the worker of a teacher's engine does."""

    def __init__(self) -> None:
        import torch

        model = SimpleNamespace(
            get_vocab_size=lambda: VOCABULARY, get_hidden_size=lambda: STATES, dtype=torch.float32
        )
        cache = SimpleNamespace(block_size=BLOCK)
        workers = SimpleNamespace(world_size=1)
        self.vllm_config = SimpleNamespace(
            model_config=model, cache_config=cache, parallel_config=workers
        )
        self.computed = 0  # rows
        self.forgets = False
        self.failures = 0  # calls to come that fail
        self._blocks: set[tuple[int, ...]] = set()

    async def generate(self, request: Any, params: Any, request_id: str) -> AsyncIterator[Any]:
        from teachers.rows import Wanted

        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("out of luck")
        tokens = tuple(request["prompt_token_ids"])
        wanted = Wanted.of(params.extra_args)
        assert wanted is not None
        assert wanted.start + wanted.rows == len(tokens)
        cached = 0 if params.skip_reading_prefix_cache or self.forgets else self._cached(tokens)
        self._blocks |= {tokens[:end] for end in range(BLOCK, len(tokens) + 1, BLOCK)}
        if cached > wanted.start:
            found = np.zeros((0, 0), np.int32)
        else:
            self.computed += wanted.rows
            found = np.array([_row(tokens, wanted, index) for index in range(wanted.rows)])
        yield SimpleNamespace(
            finished=True, prompt_token_id_logprobs=found, num_cached_tokens=cached
        )

    def _cached(self, tokens: tuple[int, ...]) -> int:
        """Whole blocks, and never all tokens."""
        ends = [end for end in range(BLOCK, len(tokens), BLOCK) if tokens[:end] in self._blocks]
        return max(ends, default=0)

    async def check_health(self) -> None: ...

    async def get_weight_version(self) -> str:
        return "0"


def _row(tokens: tuple[int, ...], wanted: Any, index: int) -> Any:
    seen = tokens[: wanted.start + index + 1]
    if wanted.states:
        return np.array([hash((seen, j)) % 997 for j in range(STATES)], np.float32)
    ids = np.frombuffer(wanted.ids, np.int32).reshape(wanted.rows, wanted.columns)[index]
    own = np.array([-(hash((seen, int(token))) % 997) for token in ids], np.float32)
    best = np.array([-(hash((seen, -1, j)) % 7 + 10.0 * j) for j in range(wanted.top_k)])
    best_ids = np.array([hash((seen, j)) % 9 + 9 * j for j in range(wanted.top_k)], np.int32)
    rest = np.array([-(hash((seen, -2)) % 5 + 30.0)] if wanted.rest else [])
    numbers = np.concatenate([own, best, rest]).astype(np.float32)
    return np.concatenate([numbers.view(np.int32), best_ids])


def replica(kind: str, engine: Engine) -> Any:
    """A real replica on a made-up engine."""
    from teachers.replica import TeacherReplica
    from teachers.spec import TeacherEngineSpec

    top_k = K if kind.endswith("topk") else 0
    spec = TeacherEngineSpec("teacher t/0", {"model": "none"}, kind, top_k, ())  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        made: Any = staticmethod(lambda *_: engine)
        patch.setattr("teachers.replica.AsyncLLM", SimpleNamespace(from_engine_args=made))
        patch.setattr("teachers.replica.AsyncEngineArgs", lambda **_: None)
        return TeacherReplica(spec)


def rollout(uid: str, tokens: Sequence[int]) -> Rollout:
    made = make_rollout(uid, tokens=len(tokens), prompt_tokens=5)
    topk = np.arange(len(tokens) * K, dtype=np.int32).reshape(-1, K) % VOCABULARY
    return replace(made, continuation=np.array(tokens, np.int32), topk_ids=topk)


def pieces(item: Rollout, ends: Sequence[int]) -> list[Piece]:
    """Cut at these numbers of tokens."""
    assert item.topk_ids is not None
    made, start = [], 0
    for end in ends:
        prompt = item.prompt.token_ids[: None if start == 0 else 0]
        ids, topk = item.response_ids[start:end], item.topk_ids[start:end]
        made.append(Piece(item.uid, "t", start, prompt, ids, topk))
        start = end
    return made


def arrays(samples: Sequence[Sample]) -> dict[str, list[Any]]:
    return {
        sample.rollout.uid: [a for a in vars(sample.scores).values() if isinstance(a, np.ndarray)]
        for sample in samples
    }


async def whole(kind: str, items: Sequence[Rollout]) -> dict[str, list[Any]]:
    batch = await replica(kind, Engine()).score(Batch.pack(items))
    return arrays(unpack_samples([batch]))


def same(found: dict[str, list[Any]], wanted: dict[str, list[Any]]) -> None:
    assert found.keys() == wanted.keys()
    for uid, own in wanted.items():
        for a, b in zip(found[uid], own, strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_rollout_in_pieces_has_the_scores_of_the_whole(kind: str) -> None:
    item, engine = rollout("p/0", range(20)), Engine()
    teacher = replica(kind, engine)
    for piece in pieces(item, [3, 10, 17]):
        assert await teacher.early(Batch.pack([piece])) == 1
    engine.computed = 0
    samples = unpack_samples([await teacher.score(Batch.pack([item]))])
    same(arrays(samples), await whole(kind, [item]))
    assert engine.computed == 3


async def test_a_rollout_whose_last_piece_is_under_way_waits_for_it() -> None:
    item, engine = rollout("p/0", range(20)), Engine()
    teacher = replica("sampled", engine)
    early = teacher.early(Batch.pack(pieces(item, [8, 16])))
    _, samples = await asyncio.gather(early, teacher.score(Batch.pack([item])))
    same(arrays(unpack_samples([samples])), await whole("sampled", [item]))
    assert engine.computed == 20


async def test_a_piece_whose_prefix_has_left_the_cache_is_the_last() -> None:
    item, engine = rollout("p/0", range(40)), Engine()
    engine.forgets = True
    teacher = replica("sampled", engine)
    used = [await teacher.early(Batch.pack([p])) for p in pieces(item, [16, 24, 32])]
    assert used == [1, 1, 0]
    await teacher.score(Batch.pack([item]))
    assert engine.computed == 40


async def test_rows_ahead_are_in_the_report() -> None:
    item, teacher = rollout("p/0", range(9)), replica("sampled", Engine())
    await teacher.early(Batch.pack(pieces(item, [4, 6])))
    await teacher.score(Batch.pack([item]))
    counters = (await teacher.report()).counters
    assert (counters["early_rows"], counters["early_used"], counters["tokens"]) == (6, 6, 14)


def pool(kind: str, engines: Sequence[Engine]) -> TeacherPool:
    replicas = [replica(kind, engine) for engine in engines]
    return TeacherPool("t", replicas, HealthConfig(tries=4))


async def test_a_finished_rollout_goes_where_its_pieces_were() -> None:
    items, engines = [rollout(f"p/{i}", range(i, 20)) for i in range(4)], [Engine(), Engine()]
    teacher = pool("sampled", engines)
    await teacher.early(Batch.pack(p for item in items for p in pieces(item, [6, 12])))
    scored = await teacher.score(Batch.pack(items))
    same(arrays(unpack_samples(scored.samples)), await whole("sampled", items))
    assert [engine.computed for engine in engines] == [20 + 18, 19 + 17]


async def test_pieces_that_cannot_be_used_are_counted() -> None:
    item, engine = rollout("p/0", range(20)), Engine()
    teacher = pool("sampled", [engine])
    first, second, third = pieces(item, [4, 8, 12])
    for piece in (first, third, second):
        await teacher.early(Batch.pack([piece]))
    await teacher.early(Batch.pack([replace(second, uid="q/0")]))
    assert (await teacher.report()).gauges["early_dropped"] == 2


async def test_a_piece_that_fails_is_a_failure_of_the_replica_and_the_rollout_is_scored() -> None:
    item, engines = rollout("p/0", range(20)), [Engine(), Engine()]
    teacher = pool("sampled", engines)
    engines[0].failures = 1
    await teacher.early(Batch.pack(pieces(item, [4])))
    scored = await teacher.score(Batch.pack([item]))
    same(arrays(unpack_samples(scored.samples)), await whole("sampled", [item]))
    gauges = (await teacher.report()).gauges
    assert (gauges["failures"], gauges["early_dropped"], gauges["serving"]) == (1, 1, 1)


async def test_a_teacher_that_scores_nothing_ahead_has_no_such_metrics() -> None:
    teacher = pool("sampled", [Engine()])
    await teacher.score(Batch.pack([rollout("p/0", range(5))]))
    assert not [key for key in (await teacher.report()).gauges if key.startswith("early")]


@dataclass(frozen=True)
class Event:
    """Something that reaches the pool: a piece, or a finished rollout."""

    rollout: int
    piece: int | None


responses = st.lists(st.integers(0, 1), max_size=14)  # so few tokens that beginnings collide


@st.composite
def histories(draw: st.DrawFn) -> tuple[list[Rollout], list[list[Piece]], list[Event], list[int]]:
    """Rollouts, their pieces, what arrives in which order (some of it never), and failures."""
    items, cut = [], []
    for index in range(draw(st.integers(1, 4))):
        lives = draw(st.lists(responses, min_size=1, max_size=2))  # the last one is finished
        items.append(rollout(f"p/{index}", lives[-1]))
        cut.append([])
        for tokens in lives:
            ends = draw(st.sets(st.integers(1, max(1, len(tokens)))))
            life = rollout(f"p/{index}", tokens)
            cut[-1] += pieces(life, sorted(end for end in ends if end <= len(tokens)))
    events = [Event(i, j) for i, found in enumerate(cut) for j in range(len(found))]
    events += [Event(i, None) for i in range(len(items))]
    events = draw(st.permutations(events)) if draw(st.booleans()) else events
    arriving = [e for e in events if e.piece is None or draw(st.integers(0, 4))]
    return items, cut, arriving, draw(st.lists(st.integers(0, 1), min_size=2, max_size=2))


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60)
@given(history=histories(), at_once=st.booleans())
def test_whatever_becomes_of_the_pieces_the_scores_are_those_of_the_whole(
    kind: str, history: Any, at_once: bool
) -> None:
    """Pieces late, lost, out of order, of a rollout that was then sampled anew; failing calls."""
    items, cut, events, failures = history

    async def check() -> None:
        engines = [Engine(), Engine()]
        teacher = pool(kind, engines)
        mending = asyncio.create_task(teacher.run())
        for engine, count in zip(engines, failures, strict=True):
            engine.failures = count
        found: dict[str, list[Any]] = {}

        async def arrive(event: Event) -> None:
            if event.piece is not None:
                await teacher.early(Batch.pack([cut[event.rollout][event.piece]]))
                return
            scored = await teacher.score(Batch.pack([items[event.rollout]]))
            found.update(arrays(unpack_samples(scored.samples)))

        if at_once:
            await asyncio.gather(*(arrive(event) for event in events))
        else:
            for event in events:
                await arrive(event)
        mending.cancel()
        same(found, await whole(kind, items))

    asyncio.run(asyncio.wait_for(check(), 20))


async def test_the_stage_scores_what_grows_and_then_what_is_finished() -> None:
    item, engine = rollout("p/0", range(20)), Engine()
    queue = MessageQueue(topics(["t"], ["t"]), 64, 1 << 20, 60.0)
    stage = ScorerStage({"t": [replica("sampled", engine)]}, queue, {"t": 8}, early=["t"])
    running = asyncio.create_task(stage.run())
    try:
        await queue.put(early_topic("t"), Batch.pack(pieces(item, [8, 16])))
        await settle()
        assert engine.computed == 16
        await queue.put(rollouts_topic("t"), Batch.pack([item]))
        lease = await asyncio.wait_for(queue.get(SCORED, 1), 5)
        same(arrays(unpack_samples(lease.batches)), await whole("sampled", [item]))
        assert engine.computed == 20
    finally:
        await stage.shutdown()
        await asyncio.wait({running})
