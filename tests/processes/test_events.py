"""Lines for one listener, whose answers may be lost."""

from __future__ import annotations

import asyncio
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.processes.events import EventLog


async def test_a_waiting_reader_gets_the_next_line() -> None:
    bulletin = EventLog()
    waiting = asyncio.create_task(bulletin.after(0))
    await asyncio.sleep(0)
    bulletin.append("a")
    assert (await asyncio.wait_for(waiting, 5)).lines == ("a",)


async def test_a_reader_that_does_not_wait_gets_none() -> None:
    assert (await EventLog().after(0, wait=False)).lines == ()


async def test_a_reader_of_another_life_gets_all_of_this_one_though_its_clock_is_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(time, "time_ns", iter(range(10**9, 0, -1)).__next__)
    before = EventLog()
    before.append("a")
    heard = (await before.after(0)).seen
    bulletin = EventLog()
    bulletin.append("b")
    assert (await bulletin.after(heard)).lines == ("b",)


@given(st.lists(st.sampled_from(["tell", "ask", "ask in vain", "ask and give up"]), max_size=30))
async def test_every_line_is_received_once_and_in_order_whatever_is_lost(events: list[str]) -> None:
    bulletin, told, heard, number = EventLog(), [], [], 0
    for event in [*events, "ask"]:
        if event == "tell":
            told.append(f"line {len(told)}")
            bulletin.append(told[-1])
        elif event == "ask and give up":
            waiting = asyncio.create_task(bulletin.after(number))
            await asyncio.sleep(0)
            waiting.cancel()
        else:
            news = await bulletin.after(number, wait=False)
            if event == "ask":
                number = news.seen
                heard += news.lines
    assert heard == told
