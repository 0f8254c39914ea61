"""The balancer: by outstanding tokens, bounded in flight."""

from __future__ import annotations

import asyncio

import pytest

from async_opd.core.balancer import Balancer


async def test_work_goes_to_the_replica_with_the_fewest_tokens() -> None:
    balancer = Balancer(["a", "b"], 4)
    async with balancer.acquire(100) as a, balancer.acquire(1) as b, balancer.acquire(1) as c:
        assert (a, b, c) == ("a", "b", "b")


async def test_a_full_replica_is_passed_over() -> None:
    balancer = Balancer(["a", "b"], 1)
    async with balancer.acquire(1), balancer.acquire(100) as second:
        assert second == "b"


async def test_work_waits_while_every_replica_is_full() -> None:
    balancer = Balancer(["a"], 1)

    async def work() -> None:
        async with balancer.acquire(1):
            pass

    async with balancer.acquire(1):
        waiting = asyncio.create_task(work())
        await asyncio.sleep(0)
        assert not waiting.done()
    await asyncio.wait_for(waiting, 1)


async def test_failed_work_gives_its_share_back() -> None:
    balancer = Balancer(["a"], 1)
    with pytest.raises(RuntimeError):
        async with balancer.acquire(7):
            raise RuntimeError
    assert (balancer.outstanding_tokens, balancer.in_flight) == ((0,), 0)


def test_no_replica_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="no replica"):
        Balancer([], 1)
