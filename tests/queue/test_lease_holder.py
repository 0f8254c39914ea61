"""Leases are renewed while their holder lives, and only those that it has."""

from __future__ import annotations

import pytest

from async_opd.core.batch import Batch
from async_opd.core.errors import StageError
from async_opd.core.reports import Interval
from async_opd.core.uid import is_traced
from async_opd.queue.lease_holder import LeaseHolder
from async_opd.queue.message_queue import MessageQueue
from tests.conftest import make_rollout
from tests.world.clock import ManualTimer, settle


def batch(*uids: str) -> Batch:
    return Batch.pack(make_rollout(uid) for uid in uids)


async def passes(timer: ManualTimer, seconds: int) -> None:
    for _ in range(seconds):
        timer.advance(1)
        await settle(20)


async def test_a_lease_is_renewed_while_its_holder_lives_unless_its_answer_is_lost() -> None:
    timer = ManualTimer()
    queue = MessageQueue(("t",), 10, 1 << 20, 10.0, timer)
    holder = LeaseHolder(queue, "x", timer)
    await queue.put("t", batch("a", "b"))
    await queue.get("t", 1, consumer="x")  # nobody has this answer
    lease = await holder.get("t", 1)
    await passes(timer, 11)
    stats = (await queue.stats())["t"]
    assert (stats.expired, stats.leased) == (1, 1)
    await passes(timer, 89)
    await holder.ack("t", lease.id)
    await holder.get("t", 1)
    assert (await queue.stats())["t"].expired == 1
    holder.close()
    await passes(timer, 11)
    assert (await queue.stats())["t"].expired == 2


async def test_what_is_acknowledged_with_the_next_get_is_renewed_no_longer() -> None:
    timer = ManualTimer()
    queue = MessageQueue(("t",), 10, 1 << 20, 10.0, timer)
    renewed: list[dict[str, tuple[int, ...]]] = []
    renew = queue.renew

    async def watched(leases: dict[str, tuple[int, ...]]) -> float:
        renewed.append(leases)
        return await renew(leases)

    queue.renew = watched  # type: ignore[method-assign, assignment]
    holder = LeaseHolder(queue, "x", timer)
    await queue.put("t", batch("a", "b"))
    first = await holder.get("t", 1)
    second = await holder.get("t", 1, ack=first.id)
    await passes(timer, 4)
    assert renewed[-1] == {"t": (second.id,)}
    holder.close()


async def test_the_arrival_of_the_samples_that_the_trace_follows_is_told_once() -> None:
    queue = MessageQueue(("t", "u"), 1000, 1 << 30, 10.0, ManualTimer())
    holder = LeaseHolder(queue, "x", ManualTimer())
    holder.clock = lambda: 7.0
    followed = [uid for uid in map(str, range(300)) if is_traced(uid)]
    await queue.put("t", batch(*map(str, range(300))))
    await holder.get("t", 300)
    assert holder.taken("u") == ()
    assert holder.taken("t") == tuple(Interval("lease", 7, 7, "", uid) for uid in followed)
    assert holder.taken("t") == ()
    holder.close()


async def test_what_ends_the_renewals_is_raised_to_who_asks_for_more() -> None:
    queue = MessageQueue(("t",), 10, 1 << 20, 10.0, ManualTimer())

    async def broken(leases: object) -> float:
        raise StageError("queue", "its process died")

    queue.renew = broken  # type: ignore[method-assign]
    holder = LeaseHolder(queue, "x")
    await queue.put("t", batch("a", "b"))
    await holder.get("t", 1)
    await settle(20)
    with pytest.raises(StageError, match="its process died"):
        await holder.get("t", 1)
