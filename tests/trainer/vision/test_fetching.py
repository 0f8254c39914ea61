"""A rank fetches the images of its samples by their hashes, each once."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import StageError
from async_opd.core.samples import DeadLetter, Header
from async_opd.core.stages import DEAD, SCORED, topics
from async_opd.queue.message_queue import MessageQueue
from tests.trainer.vision.seeing import Seen, seen
from trainer.batcher import Batcher
from trainer.batches.micro_batches import PlannedMicroBatch
from trainer.batches.packing import Vocabularies
from trainer.batches.shares import HandOut, Plan
from trainer.batches.token_weights import TokenWeight
from trainer.rank_group import SINGLE_RANK
from trainer.vision.fetching import cache_of, refuse_unseen, shown_by, take_seen

pytest.importorskip("torchvision")


SIGHT: Any = SimpleNamespace(cache_bytes=1 << 20, fetch_s=5.0)


class Images:
    """A queue that has these images, and notes each request."""

    def __init__(self, data: Seen) -> None:
        self.encoded, self.asked = dict(data.encoded), []

    async def media(self, hashes: Sequence[str]) -> dict[str, bytes]:
        self.asked += hashes
        return {sha256: self.encoded[sha256] for sha256 in hashes if sha256 in self.encoded}


async def test_samples_of_the_same_image_fetch_it_once() -> None:
    data = seen("llava", [0], [], [1, 0], [0])
    queue: Any = Images(data)
    cache = cache_of(lambda: queue, SIGHT)
    assert await shown_by(data.samples, cache) == (data.encoded, {})
    shown, _ = await shown_by(data.samples[:1], cache)
    assert shown == {data.samples[0].rollout.prompt.media[0].sha256: queue.encoded[queue.asked[0]]}
    assert sorted(queue.asked) == sorted(data.encoded)


async def test_the_cache_is_as_large_as_the_config_says_and_none_without_images() -> None:
    data = seen("llava", [0])
    queue: Any = Images(data)
    cache = cache_of(lambda: queue, SimpleNamespace(cache_bytes=1, fetch_s=5.0))
    for _ in range(2):
        await shown_by(data.samples, cache)
    assert len(queue.asked) == 2
    queue: Any = None
    assert cache_of(lambda: queue, None) is None


async def test_text_asks_for_nothing() -> None:
    data = seen("llava", [], [])
    queue: Any = Images(data)
    assert await shown_by(data.samples, cache_of(lambda: queue, SIGHT)) == ({}, {})
    assert queue.asked == []


async def test_a_sample_whose_image_the_queue_lacks_is_named_with_the_reason() -> None:
    data = seen("llava", [0], [1])
    queue: Any = Images(data)
    lost = data.samples[0].rollout.prompt.media[0].sha256
    del queue.encoded[lost]
    shown, unseen = await shown_by(data.samples, cache_of(lambda: queue, SIGHT))
    assert (shown, list(unseen)) == (queue.encoded, ["p0/0"])
    assert f"{lost} of p0/0 is not held by the queue" in unseen["p0/0"]


def test_supervised_samples_that_cannot_be_seen_are_refused_with_the_reason() -> None:
    refuse_unseen({})
    with pytest.raises(StageError, match="2 samples show images that cannot be had; a: lost"):
        refuse_unseen({"a": "lost", "b": "lost, too"})


class Scored(MessageQueue):
    """A real queue; it holds the images of the second of two samples only."""

    def __init__(self, data: Seen) -> None:
        super().__init__(topics(["t"]), 64, 1 << 20, 60.0)
        self.encoded = dict(data.encoded)
        del self.encoded[data.samples[0].rollout.prompt.media[0].sha256]

    async def media(self, hashes: Sequence[str]) -> dict[str, bytes]:
        return {sha256: self.encoded[sha256] for sha256 in hashes if sha256 in self.encoded}

    async def dead(self) -> list[tuple[str, str]]:
        lease = await self.get(DEAD, 8)
        return [(one.header.uid, one.stage) for one in unpack(DeadLetter, lease.batches)]


async def test_a_step_goes_on_without_a_sample_whose_image_is_lost() -> None:
    data = seen("llava", [0], [1])
    queue = Scored(data)
    batcher = Batcher(queue, batch_size=1)
    await queue.put(SCORED, Batch.pack(data.samples))
    cache = cache_of(lambda: queue, SIGHT)
    batch, encoded = await asyncio.wait_for(take_seen(batcher, 0, cache), 5)
    assert ([header.uid for header in batch.headers], encoded) == (["p1/0"], queue.encoded)
    assert await queue.dead() == [("p0/0", "trainer")]
    await batcher.done()
    assert await batcher.drop("p0/0")
    stats = (await queue.stats())[SCORED]
    assert (stats.acked, stats.leased) == (2, 0)
    batcher.close()


class Alone:
    """A planner of one rank, with each sample in a separate micro-batch."""

    vocabularies = Vocabularies(100_000)

    def plan(self, headers: Sequence[Header]) -> Plan:
        made = tuple(PlannedMicroBatch((i,), (TokenWeight(),)) for i in range(len(headers)))
        return Plan(tuple(headers), (made,), tuple(range(len(headers))))


async def test_ranks_are_dealt_another_batch_where_an_image_is_lost() -> None:
    data = seen("llava", [0], [1])
    queue = Scored(data)
    batcher = Batcher(queue, batch_size=1, payloads=False)
    await queue.put(SCORED, Batch.pack(data.samples))
    hand_out = HandOut(batcher, Alone(), SINGLE_RANK, cache_of(lambda: queue, SIGHT))
    dealt = await asyncio.wait_for(hand_out.take(0), 5)
    assert [header.uid for header in dealt.batch.headers] == ["p1/0"]
    assert dict(dealt.own.micro_batches[0].images) == queue.encoded
    assert await queue.dead() == [("p0/0", "trainer")]
    hand_out.close()
    batcher.close()


def test_a_header_has_the_sizes_of_a_samples_images() -> None:
    assert [one.header.images for one in seen("llava", [0, 1], []).samples] == [
        ((56, 84), (56, 84)),
        (),
    ]
