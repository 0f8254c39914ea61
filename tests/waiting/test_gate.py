"""A gate: closed, it lets nothing in, and waits for what is inside."""

from __future__ import annotations

import asyncio

from async_opd.waiting.deadline import Gate
from tests.world.clock import settle


async def test_closing_waits_for_what_is_inside_and_lets_nothing_in() -> None:
    gate, seen, go = Gate(), [], asyncio.Event()

    async def work(name: str) -> None:
        async with gate:
            seen.append(name)
            await go.wait()

    first = asyncio.create_task(work("first"))
    await settle()
    closing = asyncio.create_task(gate.close())
    second = asyncio.create_task(work("second"))
    await settle()
    assert (seen, closing.done()) == (["first"], False)
    go.set()
    await closing
    await settle()
    assert seen == ["first"]
    gate.open()
    await asyncio.gather(first, second)
    assert seen == ["first", "second"]


async def test_a_gate_that_closes_again_before_a_waiter_ran_keeps_it_out() -> None:
    gate = Gate()
    await gate.close()
    waiting = asyncio.create_task(gate.__aenter__())
    await settle()
    gate.open()
    await gate.close()
    await settle()
    assert not waiting.done()
    gate.open()
    await waiting


async def test_closing_says_whether_the_gate_was_opened_before_it_was_empty() -> None:
    gate = Gate()
    await gate.__aenter__()
    closing = asyncio.create_task(gate.close())
    await settle()
    gate.open()
    again = asyncio.create_task(gate.close())
    await settle()
    await gate.__aexit__()
    assert (await closing, await again) == (False, True)
