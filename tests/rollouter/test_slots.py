"""Slots of a replica, and how many an engine can hold."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from rollouter.slots import AdaptiveLimit, EngineLoad, Slots, first_limit


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def hold(slots: Slots, release: asyncio.Event) -> None:
    async with slots.reserve():
        await release.wait()


async def test_no_more_run_than_there_are_slots() -> None:
    slots, release = Slots(2), asyncio.Event()
    tasks = [asyncio.create_task(hold(slots, release)) for _ in range(5)]
    await settle()
    assert slots.running == 2
    release.set()
    await asyncio.gather(*tasks)
    assert slots.running == 0


async def test_more_slots_let_waiting_ones_start_at_once() -> None:
    slots, release = Slots(1), asyncio.Event()
    tasks = [asyncio.create_task(hold(slots, release)) for _ in range(3)]
    await settle()
    slots.resize(3)
    await settle()
    assert slots.running == 3
    release.set()
    await asyncio.gather(*tasks)


async def test_fewer_slots_interrupt_nobody() -> None:
    slots, release = Slots(2), asyncio.Event()
    tasks = [asyncio.create_task(hold(slots, release)) for _ in range(2)]
    await settle()
    slots.resize(1)
    assert slots.running == 2
    release.set()
    await asyncio.gather(*tasks)


async def test_one_that_is_cancelled_while_it_waits_takes_no_slot_along() -> None:
    slots, release = Slots(1), asyncio.Event()
    first = asyncio.create_task(hold(slots, release))
    waiting = asyncio.create_task(hold(slots, release))
    await settle()
    waiting.cancel()
    release.set()
    await asyncio.gather(first, waiting, return_exceptions=True)
    assert (slots.running, await asyncio.wait_for(slots.room(), 5)) == (0, 1)


async def test_room_is_reported_in_groups() -> None:
    assert await Slots(10, group_size=4).room() == 2


async def test_there_is_room_for_a_group_as_soon_as_one_slot_is_free() -> None:
    slots, release = Slots(2, group_size=4), asyncio.Event()
    task = asyncio.create_task(hold(slots, release))
    await settle()
    assert await slots.room() == 1
    release.set()
    await task


async def test_there_is_no_room_while_somebody_waits_for_a_slot() -> None:
    slots, release = Slots(1), asyncio.Event()
    tasks = [asyncio.create_task(hold(slots, release)) for _ in range(2)]
    await settle()
    room = asyncio.create_task(slots.room())
    await settle()
    assert not room.done()
    release.set()
    await asyncio.gather(*tasks)
    assert await asyncio.wait_for(room, 5) == 1


def test_an_engine_that_takes_everything_gets_more_up_to_a_few_that_wait() -> None:
    limit = AdaptiveLimit(32, limit=8)
    for _ in range(100):
        limit.observe(EngineLoad(min(limit.limit, 32), max(0, limit.limit - 32), 0, 0.3))
    assert limit.limit == 34


def test_preemption_brings_the_limit_down_to_what_runs() -> None:
    assert AdaptiveLimit(64).observe(EngineLoad(20, 5, 3, 0.99)) == 20


def test_requests_that_wait_for_kv_cache_bring_the_limit_down() -> None:
    assert AdaptiveLimit(64).observe(EngineLoad(20, 5, 0, 0.97)) == 20


def test_requests_that_wait_behind_a_full_batch_do_not() -> None:
    assert AdaptiveLimit(64).observe(EngineLoad(64, 4, 0, 0.5)) == 68


def test_a_full_kv_cache_without_waiting_requests_is_left_as_it_is() -> None:
    assert AdaptiveLimit(64, limit=30).observe(EngineLoad(30, 0, 0, 0.95)) == 30


@given(
    capacity=st.integers(1, 200),
    max_num_seqs=st.integers(1, 128),
    start=st.integers(1, 128),
)
def test_the_limit_settles_at_what_the_engine_holds(
    capacity: int, max_num_seqs: int, start: int
) -> None:
    limit = AdaptiveLimit(max_num_seqs, limit=min(start, max_num_seqs))
    for _ in range(400):  # an engine whose KV cache holds so many requests
        running = min(limit.limit, max_num_seqs, capacity)
        waiting = limit.limit - running
        limit.observe(EngineLoad(running, waiting, 0, running / capacity))
    held = min(max_num_seqs, capacity)
    assert 0.85 * held - 1 <= limit.limit <= limit.max_limit


def test_a_fixed_concurrency_keeps_the_engines_own_line_short() -> None:
    """Held rows wait for all requests that wait in the engine before them."""
    found = [first_limit(given, 256) for given in ("auto", 32, 256, 1000)]
    assert found == [272, 32, 256, 272]
