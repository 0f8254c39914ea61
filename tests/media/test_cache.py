"""A process fetches an image once, and keeps those that it used last."""

from __future__ import annotations

import asyncio
import hashlib
import pickle
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import RolloutFault, StageError, StageTimeout
from async_opd.core.row import Media
from async_opd.media.cache import FromQueue, MediaCache
from tests.properties import examples


def image(encoded: bytes) -> Media:
    return Media(hashlib.sha256(encoded).hexdigest(), len(encoded), 1, 1)


class Held:
    """The images of a queue; ``calls`` are the hashes of each fetch."""

    def __init__(self, *encoded: bytes) -> None:
        self.bytes = {image(one).sha256: one for one in encoded}
        self.calls: list[list[str]] = []
        self.open = asyncio.Event()
        self.open.set()
        self.asked = asyncio.Event()
        self.error: Exception | None = None

    async def fetch(self, hashes: Sequence[str]) -> Mapping[str, bytes]:
        self.calls.append(list(hashes))
        self.asked.set()
        await self.open.wait()
        if self.error is not None:
            raise self.error
        return {one: self.bytes[one] for one in hashes if one in self.bytes}


class Stored:
    """A queue that holds one image."""

    async def media(self, hashes: Sequence[str]) -> Mapping[str, bytes]:
        return {image(b"a").sha256: b"a"}


async def test_images_come_in_the_order_of_their_references_and_once_a_hash() -> None:
    held = Held(b"a", b"b")
    cache = MediaCache(held.fetch, 100)
    got = await cache.get([image(b"b"), image(b"a"), image(b"b")])
    assert got == [b"b", b"a", b"b"]
    assert held.calls == [[image(b"b").sha256, image(b"a").sha256]]


async def test_what_is_kept_is_not_fetched_again() -> None:
    held = Held(b"a", b"b")
    cache = MediaCache(held.fetch, 100)
    await cache.get([image(b"a")])
    assert await cache.get([image(b"a"), image(b"b")]) == [b"a", b"b"]
    assert held.calls == [[image(b"a").sha256], [image(b"b").sha256]]


async def test_callers_at_the_same_time_share_one_fetch() -> None:
    held = Held(b"a")
    held.open.clear()
    cache = MediaCache(held.fetch, 100)
    asking = [asyncio.create_task(cache.get([image(b"a")])) for _ in range(8)]
    await held.asked.wait()
    held.open.set()
    assert [await one for one in asking] == [[b"a"]] * 8
    assert len(held.calls) == 1


async def test_a_waiter_that_is_cancelled_does_not_end_the_fetch_of_the_others() -> None:
    held = Held(b"a")
    held.open.clear()
    cache = MediaCache(held.fetch, 100)
    first, second = (asyncio.create_task(cache.get([image(b"a")])) for _ in range(2))
    await held.asked.wait()
    first.cancel()
    held.open.set()
    assert await second == [b"a"]
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_what_was_not_used_for_longest_goes_first() -> None:
    held = Held(b"aa", b"bb", b"cc")
    cache = MediaCache(held.fetch, 4)
    for encoded in (b"aa", b"bb", b"aa", b"cc", b"aa", b"bb"):
        await cache.get([image(encoded)])
    assert [held.bytes[one] for [one] in held.calls] == [b"aa", b"bb", b"cc", b"bb"]


async def test_an_image_larger_than_the_bound_is_fetched_and_not_kept() -> None:
    held = Held(b"large", b"a")
    cache = MediaCache(held.fetch, 1)
    assert await cache.get([image(b"large"), image(b"a")]) == [b"large", b"a"]
    assert await cache.get([image(b"large"), image(b"a")]) == [b"large", b"a"]
    assert held.calls[1:] == [[image(b"large").sha256]]
    assert cache.held_bytes == 1


async def test_bytes_of_another_image_are_refused_and_asked_for_again() -> None:
    held = Held(b"a")
    held.bytes[image(b"a").sha256] = b"other"
    cache = MediaCache(held.fetch, 100)
    with pytest.raises(RolloutFault, match=f"image {image(b'a').sha256} of 0:3#0/1 came as 5 b"):
        await cache.get([image(b"a")], of="0:3#0/1")
    held.bytes[image(b"a").sha256] = b"a"
    assert await cache.get([image(b"a")]) == [b"a"]


async def test_an_image_that_nobody_holds_is_an_error_with_uid_and_hash() -> None:
    cache = MediaCache(Held().fetch, 100)
    with pytest.raises(RolloutFault, match=f"image {image(b'a').sha256} of 0:3#0/1 is not held"):
        await cache.get([image(b"a")], of="0:3#0/1")


async def test_an_image_that_nobody_holds_fails_no_other_that_was_asked_for_with_it() -> None:
    held = Held(b"a")
    held.open.clear()
    cache = MediaCache(held.fetch, 100)
    both = asyncio.create_task(cache.get([image(b"a"), image(b"b")]))
    await held.asked.wait()
    one = asyncio.create_task(cache.get([image(b"a")]))
    held.open.set()
    assert await one == [b"a"]
    with pytest.raises(RolloutFault, match="is not held"):
        await both


async def test_a_failed_fetch_fails_all_waiting_callers_and_is_tried_again() -> None:
    held = Held(b"a")
    held.open.clear()
    held.error = StageError("queue", "it died")
    cache = MediaCache(held.fetch, 100)
    asking = [asyncio.create_task(cache.get([image(b"a")])) for _ in range(3)]
    await held.asked.wait()
    held.open.set()
    for one in asking:
        with pytest.raises(StageError, match="it died"):
            await one
    held.error = None
    assert await cache.get([image(b"a")]) == [b"a"]


async def test_a_fetch_that_takes_too_long_is_an_error_and_tried_again() -> None:
    held = Held(b"a")
    held.open.clear()
    cache = MediaCache(held.fetch, 100, timeout_s=0.01)
    with pytest.raises(StageTimeout, match=r"1 images were not fetched within 0\.01 s"):
        await cache.get([image(b"a")])
    held.open.set()
    assert await cache.get([image(b"a")]) == [b"a"]


async def test_a_prompt_without_images_fetches_nothing() -> None:
    held = Held()
    assert await MediaCache(held.fetch, 100).get([]) == []
    assert held.calls == []


async def test_a_report_counts_since_the_last_one() -> None:
    held = Held(b"aaa", b"b")
    cache = MediaCache(held.fetch, 100)
    await cache.get([image(b"aaa")])
    cache.report()
    await cache.get([image(b"aaa"), image(b"b")])
    assert cache.report() == {
        "image_fetched_bytes": 1.0,
        "image_asked": 2.0,
        "image_hits": 1.0,
        "image_held_bytes": 4.0,
    }


async def test_a_new_cache_crosses_a_process_border_with_its_queue() -> None:
    cache = pickle.loads(pickle.dumps(MediaCache(FromQueue(Stored()), 7)))  # type: ignore[arg-type]
    assert await cache.get([image(b"a")]) == [b"a"]


@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=12), st.integers(0, 12))
@examples(60)
def test_at_any_load_bytes_are_right_and_no_more_than_the_bound_is_kept(
    asked: list[list[int]], most: int
) -> None:
    encoded = [bytes([number]) * number for number in range(6)]
    held = Held(*encoded)
    cache = MediaCache(held.fetch, most)

    async def ask(numbers: list[int]) -> None:
        got = await cache.get([image(encoded[number]) for number in numbers])
        assert got == [encoded[number] for number in numbers]
        assert 0 <= cache.held_bytes <= most

    async def all_at_once() -> None:
        async with asyncio.TaskGroup() as group:
            for numbers in asked:
                group.create_task(ask(numbers))

    asyncio.run(all_at_once())
    in_flight = {sha256 for call in held.calls for sha256 in call}
    assert in_flight == {image(encoded[number]).sha256 for numbers in asked for number in numbers}
