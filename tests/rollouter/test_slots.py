"""Slots of a replica, and how many an engine can hold."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouter.slots import AdaptiveLimit, EngineLoad, Slots, first_limit
from tests.world.clock import settle


async def hold(slots: Slots, release: asyncio.Event) -> None:
    async with slots.reserve():
        await release.wait()


async def test_no_more_run_than_there_are_slots_however_their_number_changes() -> None:
    """More let waiting ones start at once, fewer interrupt nobody."""
    slots, release, running = Slots(2), asyncio.Event(), []
    tasks = [asyncio.create_task(hold(slots, release)) for _ in range(5)]
    for limit in (2, 4, 1):
        slots.resize(limit)
        await settle(5)
        running.append(slots.running)
    release.set()
    await asyncio.gather(*tasks)
    assert (running, slots.running) == ([2, 4, 4], 0)


async def test_one_that_is_cancelled_while_it_waits_takes_no_slot_along() -> None:
    slots, release = Slots(1), asyncio.Event()
    first = asyncio.create_task(hold(slots, release))
    waiting = asyncio.create_task(hold(slots, release))
    await settle(5)
    waiting.cancel()
    release.set()
    await asyncio.gather(first, waiting, return_exceptions=True)
    assert (slots.running, await asyncio.wait_for(slots.room(), 5)) == (0, 1)


async def test_there_is_no_room_while_somebody_waits_for_a_slot() -> None:
    slots, release = Slots(1), asyncio.Event()
    tasks = [asyncio.create_task(hold(slots, release)) for _ in range(2)]
    await settle(5)
    room = asyncio.create_task(slots.room())
    await settle(5)
    assert not room.done()
    release.set()
    await asyncio.gather(*tasks)
    assert await asyncio.wait_for(room, 5) == 1


async def test_room_is_in_groups_and_there_is_some_as_soon_as_one_slot_is_free() -> None:
    assert await Slots(10, group_size=4).room() == 2
    slots, release = Slots(2, group_size=4), asyncio.Event()
    task = asyncio.create_task(hold(slots, release))
    await settle(5)
    assert await slots.room() == 1
    release.set()
    await task


def test_few_wait_in_an_engine_adaptive_or_fixed() -> None:
    """Held rows wait for all requests that wait in the engine before them."""
    limit = AdaptiveLimit(32, limit=8)
    for _ in range(100):
        limit.observe(EngineLoad(min(limit.limit, 32), max(0, limit.limit - 32), 0, 0.3))
    assert limit.limit == 34
    found = [first_limit(given, 256) for given in ("auto", 32, 256, 1000)]
    assert found == [272, 32, 256, 272]


@pytest.mark.parametrize(
    ("given", "load", "limit"),
    [
        ({}, EngineLoad(20, 5, 3, 0.99), 20),
        ({}, EngineLoad(20, 5, 0, 0.97), 20),
        ({}, EngineLoad(64, 4, 0, 0.5), 68),
        ({"limit": 30}, EngineLoad(30, 0, 0, 0.95), 30),
    ],
    ids=["preemption", "waiting for KV cache", "waiting behind a full batch", "full, none waits"],
)
def test_the_limit_comes_down_to_the_running_requests_where_the_kv_cache_is_short(
    given: dict[str, int], load: EngineLoad, limit: int
) -> None:
    assert AdaptiveLimit(64, **given).observe(load) == limit


@given(capacity=st.integers(1, 200), max_num_seqs=st.integers(1, 128), start=st.integers(1, 128))
def test_the_limit_settles_at_the_capacity(capacity: int, max_num_seqs: int, start: int) -> None:
    limit = AdaptiveLimit(max_num_seqs, limit=min(start, max_num_seqs))
    for _ in range(400):  # an engine whose KV cache holds so many requests
        running = min(limit.limit, max_num_seqs, capacity)
        waiting = limit.limit - running
        limit.observe(EngineLoad(running, waiting, 0, running / capacity))
    held = min(max_num_seqs, capacity)
    assert 0.85 * held - 1 <= limit.limit <= limit.max_limit
