"""The balancer: by outstanding tokens, bounded in flight, oldest first, members fail and return."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.core.errors import NoReplica
from async_opd.processes.members import Member, MemberSet, Policy
from teachers.balancer import Balancer, Reservation
from tests.properties import examples
from tests.world.clock import settle

NAMES = "abcdefgh"


async def works(member: Member[str]) -> None:
    """Every probe succeeds."""


class Pool:
    """Members ``a``, ``b``, … whose balancer holds ``limit`` pieces of work on each."""

    def __init__(self, names: str, limit: int) -> None:
        self.policy = Policy[str](supervision=SupervisionConfig(), probe=works)
        self.members = MemberSet("teacher t", {name: name for name in names}, self.policy)
        self.balancer = Balancer(self.members, limit)

    def eject(self, name: str) -> None:
        member = self.members[name]
        self.members.fail(member, member.incarnation, RuntimeError("no memory left"))

    async def restore(self, name: str) -> None:
        if self.members[name] not in self.members.serving:
            await self.members.mend(self.members[name])

    async def remove(self, name: str) -> None:
        self.members.policy = Policy[str](supervision=SupervisionConfig())
        self.eject(name)
        await self.members.mend(self.members[name])

    def rebuild(self, name: str) -> None:
        self.eject(name)
        self.members.replaced(self.members[name], name)

    async def take(self, tokens: int, key: object = None) -> str:
        """Where work goes, which is never done."""
        return (await self.balancer.reserve(tokens, key)).member.name


async def test_of_equally_loaded_replicas_the_one_unused_for_longest_is_next() -> None:
    pool, picked = Pool("abc", 1), []
    for _ in range(6):
        place = await pool.balancer.reserve(1)
        picked.append(place.member.name)
        pool.balancer.release(place)
    assert picked == ["a", "b", "c"] * 2


async def test_where_there_is_room_not_all_are_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, asked = Pool("ab", 4), []
    monkeypatch.setattr(MemberSet, "left", property(lambda members: asked.append(members)))
    assert await pool.take(1) == "a"
    assert asked == []


async def test_work_waits_while_every_replica_is_full() -> None:
    balancer = Pool("a", 1).balancer
    place = await balancer.reserve(1)
    waiting = asyncio.create_task(balancer.reserve(1))
    await settle(3)
    assert (waiting.done(), balancer.waiting) == (False, 1)
    balancer.release(place)
    await asyncio.wait_for(waiting, 5)


async def test_cancelled_work_passes_its_place_on_even_if_it_was_just_given_one() -> None:
    balancer = Pool("a", 1).balancer
    place = await balancer.reserve(1)
    first, second = (asyncio.create_task(balancer.reserve(1)) for _ in range(2))
    await settle(3)
    balancer.release(place)
    first.cancel()  # it has the place, and has not run since
    assert (await asyncio.wait_for(second, 5)).member.name == "a"


async def test_a_place_released_twice_counts_once() -> None:
    balancer = Pool("a", 2).balancer
    place, other = await balancer.reserve(5), await balancer.reserve(3)
    balancer.release(place)
    balancer.release(place)
    assert (balancer.outstanding_tokens, balancer.in_flight) == ((3,), 1)
    balancer.release(other)


def test_no_replica_and_no_place_on_one_are_refused_at_once_with_the_arithmetic() -> None:
    with pytest.raises(NoReplica, match="0 replicas x 4 in flight each can serve 0 requests"):
        Pool("", 4)
    with pytest.raises(ValueError, match="0 in flight per replica"):
        Pool("a", 0)


async def test_a_replica_that_left_gets_nothing_more() -> None:
    pool = Pool("ab", 9)
    await pool.remove("a")
    assert {await pool.take(1) for _ in range(4)} == {"b"}
    assert pool.balancer.outstanding_tokens == (4,)


async def test_when_the_last_replica_leaves_waiting_and_later_work_fails_with_a_reason() -> None:
    pool = Pool("a", 1)
    held = await pool.balancer.reserve(1)
    waiting = asyncio.create_task(pool.balancer.reserve(1))
    await settle(3)
    await pool.remove("a")
    reason = "teacher t: all 1 replicas are gone; the last failure: RuntimeError: no memory left"
    for work in (waiting, pool.balancer.reserve(1)):
        with pytest.raises(NoReplica, match=reason):
            await asyncio.wait_for(work, 5)
    pool.balancer.release(held)


async def test_a_replica_that_was_rebuilt_starts_from_nothing_and_takes_waiting_work() -> None:
    pool = Pool("a", 1)
    held = await pool.balancer.reserve(9)
    waiting = asyncio.create_task(pool.take(1))
    await settle(3)
    pool.rebuild("a")
    assert await asyncio.wait_for(waiting, 5) == "a"
    pool.balancer.release(held)
    assert pool.balancer.outstanding_tokens == (1,)


@pytest.mark.parametrize(("limit", "places"), [(9, "aab"), (1, "ab")])
async def test_work_with_a_key_stays_while_that_saves_time(limit: int, places: str) -> None:
    """It does not wait for a full replica."""
    pool = Pool("ab", limit)
    assert [await pool.take(10, "p") for _ in places] == [*places]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 5))
def test_affinity_keeps_the_gap_below_two_requests(keys: list[int], replicas: int) -> None:
    async def run() -> None:
        balancer = Pool(NAMES[:replicas], 1000).balancer
        for key in keys:
            await balancer.reserve(10, key)
            tokens = balancer.outstanding_tokens
            assert max(tokens) - min(tokens) <= 2 * 10

    asyncio.run(run())


async def test_keys_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("teachers.balancer.REMEMBERED_KEYS", 2)
    pool = Pool("ab", 9)
    assert [await pool.take(1, key) for key in range(5)] == [*"ababa"]
    assert await pool.take(1, 4) == "a"  # remembered, though b has fewer tokens
    assert [await pool.take(1, key) for key in (0, 2)] == [*"bb"]


# ── any sequence of events ─────────────────────────────────────────────────────────────────────


@dataclass
class Model:
    """What must be true of a balancer, kept in the plainest way."""

    pool: Pool
    limits: dict[str, int]
    ejected: set[str] = field(default_factory=set)
    held: list[Reservation[str]] = field(default_factory=list)
    queue: list[asyncio.Task[Reservation[str]]] = field(default_factory=list)

    @property
    def balancer(self) -> Balancer[str]:
        return self.pool.balancer

    def counted(self) -> Counter[str]:
        return Counter(place.member.name for place in self.held)

    async def check(self, before: Counter[str]) -> None:
        await settle(3)
        served = [task.done() for task in self.queue]
        assert served == sorted(served, reverse=True), "a younger one was served before an older"
        self.held += [task.result() for task in self.queue if task.done()]
        self.queue = [task for task in self.queue if not task.done()]
        counts = self.counted()
        for replica, limit in self.limits.items():
            grown = counts[replica] > before[replica]
            assert counts[replica] <= limit or not grown
            assert not (grown and replica in self.ejected)
        room = any(
            counts[replica] < limit and replica not in self.ejected
            for replica, limit in self.limits.items()
        )
        assert not (room and self.queue), "room and a waiter: a wake-up was lost"
        assert self.balancer.in_flight == len(self.held)
        assert sum(self.balancer.outstanding_tokens) == sum(place.tokens for place in self.held)


events = st.lists(
    st.tuples(
        st.sampled_from(
            ["take", "take", "take", "release", "release", "cancel", "eject", "restore"]
        ),
        st.integers(0, 99),
    ),
    max_size=80,
)


async def act(model: Model, event: str, number: int) -> None:
    replica = NAMES[number % len(model.limits)]
    if event == "take":
        key = number % 7 if number % 3 else None
        model.queue.append(asyncio.create_task(model.balancer.reserve(number, key)))
    elif event == "release" and model.held:
        model.balancer.release(model.held.pop(number % len(model.held)))
    elif event == "cancel" and model.queue:
        model.queue.pop(number % len(model.queue)).cancel()
    elif event == "eject":
        model.pool.eject(replica)
        model.ejected.add(replica)
    elif event == "restore":
        model.ejected.discard(replica)
        await model.pool.restore(replica)


@examples(200)
@given(events, st.integers(1, 4), st.integers(1, 3))
def test_limits_hold_order_holds_no_wake_up_is_lost_and_tokens_return_to_zero(
    happening: list[tuple[str, int]], replicas: int, limit: int
) -> None:
    async def run() -> None:
        names = NAMES[:replicas]
        model = Model(Pool(names, limit), dict.fromkeys(names, limit))
        for event, number in happening:
            before = model.counted()
            await act(model, event, number)
            await model.check(before)
        while model.held or model.queue:
            before = model.counted()
            await act(model, "release" if model.held else "restore", 0)
            for replica in list(model.ejected):
                await act(model, "restore", NAMES.index(replica))
            await model.check(before)
        assert model.balancer.outstanding_tokens == (0,) * replicas

    asyncio.run(run())


@examples(100)
@given(st.lists(st.integers(0, 1000), max_size=200), st.integers(1, 8), st.data())
def test_the_least_loaded_is_chosen(sizes: list[int], replicas: int, data: st.DataObject) -> None:
    async def run() -> None:
        balancer = Pool(NAMES[:replicas], 10**6).balancer
        held = []
        for size in sizes:
            before = balancer.outstanding_tokens
            held.append(await balancer.reserve(size))
            assert before[held[-1].member.index] == min(before)
            if data.draw(st.booleans()):
                balancer.release(held.pop(data.draw(st.integers(0, len(held) - 1))))

    asyncio.run(run())
