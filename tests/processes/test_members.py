"""Members die in any state, in any order: what becomes of them, and what the events say of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.core.errors import Displaced, RolloutFault, StageError, StageTimeout, first_cause
from async_opd.processes.events import Event, State
from async_opd.processes.members import LONGEST_PAUSE_S, MemberSet, Policy, Restarts
from async_opd.waiting.waits import Waits
from tests.world.clock import ManualTimer, settle
from tests.world.places import FakePlaces

SERVING, EJECTED, ABSENT, REBUILDING, GONE = State
ARROWS = {
    (SERVING, EJECTED),
    (EJECTED, SERVING),
    (EJECTED, REBUILDING),
    (EJECTED, GONE),
    (REBUILDING, REBUILDING),
    (REBUILDING, SERVING),
    (REBUILDING, GONE),
    (EJECTED, ABSENT),
    (REBUILDING, ABSENT),
    (ABSENT, REBUILDING),
}


@dataclass(eq=False)
class Process:
    """Who has a member's place."""

    name: str
    number: int = 0
    hangs: bool = False
    dead: asyncio.Event = field(default_factory=asyncio.Event)


class World:
    """Members whose processes, probes and rebuilds fail when told to; time passes when told to."""

    def __init__(self, count: int = 1, *, tries: int = 3, probes: int = 0, **policy: Any) -> None:
        self.timer = ManualTimer()
        self.tries = tries
        self.unfit: set[str] = set()  # fail their probes
        self.broken: set[str] = set()  # cannot be rebuilt
        self.reached = 0.0
        self.left: list[tuple[str, int]] = []
        self.tried: list[tuple[str, float, float]] = []  # a rebuild: who, when, what was reached
        self.probed: list[float] = []
        self.events: list[tuple[float, Event]] = []
        care: dict[str, Any] = {"serve": self._serve, "alive": self._alive, "leave": self._leave}
        care |= {"rebuild": self._rebuild, "reached": lambda member: self.reached}
        care |= {"probe": self._probe, "probes": probes} if probes else {}
        supervision = SupervisionConfig(max_restarts=tries, delay_s=2, window_s=100, timeout_s=60)
        self.members = MemberSet(
            "world",
            {f"m/{index}": Process(f"m/{index}") for index in range(count)},
            Policy(supervision=supervision, **(care | policy)),
            timer=self.timer,
            clock=self.timer.clock,
        )
        self.members.listen(lambda event: self.events.append((self.timer.now, event)))
        self.running = asyncio.create_task(self.members.run())

    async def _serve(self, member: Any) -> None:
        await member.value.dead.wait()
        raise StageError(member.name, "its process died")

    async def _alive(self, member: Any) -> None:
        async def answers(process: Process) -> None:
            if process.hangs:
                await asyncio.Event().wait()

        await self.members.call(member, 60, "a sign of life", answers)

    async def _leave(self, member: Any) -> None:
        self.left.append((member.name, member.incarnation))

    async def _probe(self, member: Any) -> Exception | None:
        self.probed.append(self.timer.now)
        if member.value.dead.is_set():
            raise StageError(member.name, "its process died")
        return StageError(member.name, "wrong answer") if member.name in self.unfit else None

    async def _rebuild(self, member: Any) -> Process:
        self.tried.append((member.name, self.timer.now, self.reached))
        await asyncio.sleep(0)
        if member.name in self.broken:
            raise StageError(member.name, "out of memory")
        return Process(member.name, member.value.number + 1 if member.value else 0)

    @classmethod
    async def started(cls, count: int = 1, **how: Any) -> World:
        """Whose members run."""
        made = cls(count, **how)
        await settle()
        return made

    async def dies(self, index: int = 0) -> None:
        """A member's process dies, and what follows from it happens."""
        self.members.all[index].value.dead.set()
        await settle()

    def fails(self, why: str = "a call failed", incarnation: int = 0) -> bool:
        """The first member fails."""
        return self.members.fail(self.members["m/0"], incarnation, StageError("m/0", why))

    async def advance(self, seconds: float) -> None:
        """Lets so much time pass, from one timer that is due to the next."""
        end = self.timer.now + seconds
        await settle()
        while due := [left for left in self.timer.left if self.timer.now + left <= end]:
            await self.timer.passes(min(due))
        await self.timer.passes(end - self.timer.now)

    @property
    def messages(self) -> list[str]:
        return [str(event) for _, event in self.events]

    def states(self) -> list[State]:
        return [member.state for member in self.members.all]


async def test_a_member_that_fails_once_and_proves_itself_serves_again_as_the_same() -> None:
    world = await World.started(probes=1)
    world.fails()
    await settle()
    assert world.messages == ["m/0 is ejected: m/0: a call failed", "m/0 serves again"]
    assert (world.members["m/0"].incarnation, world.members["m/0"].failure) == (0, None)


async def test_a_member_that_dies_is_rebuilt_without_waiting_for_its_probes() -> None:
    world = await World.started(probes=5, took_s=lambda member: 13.6)
    await world.dies()
    assert world.messages == [
        "m/0 is ejected: m/0: its process died",
        "m/0 is being rebuilt (its last start took 14 s)",
        "m/0 is rebuilt",
    ]
    assert world.members["m/0"].incarnation == world.members.rebuilds == 1


async def test_a_member_that_gives_no_sign_of_life_is_rebuilt() -> None:
    world = await World.started()
    world.members["m/0"].value.hangs = True
    await world.advance(70)
    assert world.messages[0] == (
        "m/0 is ejected: m/0: a sign of life took longer than 60 s "
        "→ see supervision and teachers.*.health"
    )
    assert world.states() == [SERVING]


async def test_a_member_whose_loop_ends_has_failed() -> None:
    async def ends(member: Any) -> None:
        if not member.incarnation:
            return
        await asyncio.Event().wait()

    world = await World.started(serve=ends)
    assert world.messages[0] == "m/0 is ejected: m/0: its loop ended during the run"


async def test_a_member_that_keeps_failing_its_probes_is_rebuilt_after_the_last_one() -> None:
    world = await World.started(probes=3)
    world.unfit = {"m/0"}
    world.fails()
    await world.advance(8)
    assert world.probed == [0, 2, 8]
    assert world.members["m/0"].incarnation == 1


async def test_one_that_nobody_can_rebuild_is_probed_30_s_apart_at_most_and_then_given_up() -> None:
    world = await World.started(probes=1000, patience_s=100, rebuild=None)
    world.unfit = {"m/0"}
    world.fails()
    await world.advance(140)
    assert world.probed == [0, 2, 8, 22, 52, 82, 112]
    assert (
        max(b - a for a, b in zip(world.probed, world.probed[1:], strict=False)) <= LONGEST_PAUSE_S
    )
    assert world.messages[-1] == "m/0 is gone for good: m/0: wrong answer"


async def test_what_an_ejected_member_held_is_given_back_before_it_is_rebuilt() -> None:
    given = asyncio.Event()

    async def leave(member: Any) -> None:
        await given.wait()

    world = await World.started(leave=leave)
    await world.dies()
    assert (world.states(), world.tried) == ([EJECTED], [])
    given.set()
    await settle()
    assert world.states() == [SERVING]


async def test_the_last_member_that_is_needed_ends_the_run_with_the_newest_failure() -> None:
    world = await World.started(2, tries=1, needed=1)
    world.broken = {"m/0", "m/1"}
    world.members["m/0"].value.dead.set()
    await world.advance(9)
    assert (world.states(), world.running.done()) == ([GONE, SERVING], False)
    world.members["m/1"].value.dead.set()
    await world.advance(9)
    with pytest.raises(ExceptionGroup) as caught:
        await world.running
    assert str(first_cause(caught.value)) == "m/1: out of memory"


async def test_who_waits_for_a_state_is_woken_by_the_event_that_makes_it_true() -> None:
    world = await World.started(2)
    world.broken = {"m/0"}
    world.members["m/0"].value.dead.set()
    waiting = asyncio.create_task(world.members.until(lambda: len(world.members.serving) == 2))
    await settle()
    assert not waiting.done()
    world.broken = set()
    await world.advance(2)
    assert waiting.done()


def raises(error: Exception) -> Callable[[Process], Coroutine[Any, Any, None]]:
    async def work(process: Process) -> None:
        raise error

    return work


@pytest.mark.parametrize("spared", [False, True])
async def test_a_call_that_fails_ejects_its_member_unless_spared_and_raises(spared: bool) -> None:
    world = World(rebuild=None)
    spare = RolloutFault if spared else ()
    call = world.members.call(
        world.members["m/0"], 1, "scoring", raises(RolloutFault("call", "no")), spare=spare
    )
    with pytest.raises(RolloutFault, match="no"):
        await call
    assert (world.states(), world.members.failures) == (
        ([SERVING], 0) if spared else ([EJECTED], 1)
    )


async def test_a_call_that_takes_too_long_is_its_members_failure() -> None:
    async def hangs(process: Process) -> None:
        await asyncio.Event().wait()

    world = World(rebuild=None)
    member = world.members["m/0"]
    calling = asyncio.create_task(world.members.call(member, 5, "scoring", hangs))
    await world.advance(5)
    with pytest.raises(StageTimeout, match="m/0: scoring took longer than 5 s"):
        await calling
    assert str(member.failure).startswith("m/0: scoring took longer than 5 s")


async def test_a_call_that_fails_after_a_rebuild_is_not_the_next_incarnations_failure() -> None:
    world, late = World(), asyncio.Event()

    async def fails_late(process: Process) -> None:
        await late.wait()
        raise StageError("call", "no")

    await settle()
    member = world.members["m/0"]
    calling = asyncio.create_task(world.members.call(member, 99, "scoring", fails_late))
    await settle()
    member.value.dead.set()
    await settle()
    late.set()
    with pytest.raises(StageError, match="no"):
        await calling
    assert (world.states(), member.incarnation) == ([SERVING], 1)


async def test_all_that_serve_are_asked_and_those_that_succeed_are_heard() -> None:
    async def work(process: Process) -> str:
        if process.name == "m/1":
            raise StageError(process.name, "no")
        return process.name

    world = World(3, rebuild=None)
    world.members.fail(world.members["m/2"], 0, StageError("m/2", "its process died"))
    found = await world.members.ask(5, "a report", work)
    assert list(found.values()) == ["m/0"]
    assert world.states() == [SERVING, GONE, GONE]


@pytest.mark.parametrize("dead", [False, True])
async def test_a_member_replaced_by_others_serves_as_its_next_incarnation(dead: bool) -> None:
    world = await World.started()
    world.running.cancel()
    await settle()
    member = world.members["m/0"]
    if dead:
        world.members.fail(member, 0, StageError("m/0", "its process died"))
    world.members.replaced(member, Process("m/0", 7))
    assert (member.state, member.incarnation, member.value.number) == (SERVING, 1, 7)
    assert (member.failure, len(world.tried)) == (None, 0)


# ── properties ─────────────────────────────────────────────────────────────────────────────────

ACTIONS: dict[str, Callable[[World, int], object]] = {
    "dies": lambda world, index: world.members.all[index].value.dead.set(),
    "hangs": lambda world, index: setattr(world.members.all[index].value, "hangs", True),
    "fails a call": lambda world, index: world.members.fail(
        world.members.all[index], world.members.all[index].incarnation, StageError("call", "no")
    ),
    "fails a call late": lambda world, index: world.members.fail(
        world.members.all[index], world.members.all[index].incarnation - 1, StageError("call", "no")
    ),
    "cannot be rebuilt": lambda world, index: world.broken.add(f"m/{index}"),
    "can be rebuilt": lambda world, index: world.broken.discard(f"m/{index}"),
    "fails probes": lambda world, index: world.unfit.add(f"m/{index}"),
    "passes probes": lambda world, index: world.unfit.discard(f"m/{index}"),
    "does something": lambda world, index: setattr(world, "reached", world.reached + 1),
    "run ends": lambda world, index: world.running.cancel(),
}


async def played(world: World, script: list[tuple[str, int, int]]) -> None:
    """Plays the script, then lets everything heal and so much time pass that nothing is left."""
    for action, index, seconds in script:
        before = world.members.all[index].incarnation
        late = action == "fails a call late"
        count = len(world.events)
        ACTIONS[action](world, index)
        if late:
            assert (len(world.events), world.members.all[index].incarnation) == (count, before)
        await settle()
        if world.running.cancelled():
            world.running = asyncio.create_task(world.members.run())
        await world.advance(seconds)
    world.broken.clear()
    world.unfit.clear()
    await world.advance(120)


def check_events(world: World) -> None:
    """Every event is an arrow from where the member was; a rebuild alone makes an incarnation."""
    at = {member.name: (SERVING, 0) for member in world.members.all}
    for _, event in world.events:
        before, number = at[event.member]
        assert (before, event.after) in ARROWS
        assert event.before is before
        rebuilt = (before, event.after) == (REBUILDING, SERVING)
        assert event.incarnation == number + rebuilt
        at[event.member] = event.after, event.incarnation
    assert at == {m.name: (m.state, m.incarnation) for m in world.members.all}


def check_backoff(world: World) -> None:
    """Every rebuild was announced, and began no sooner than was said."""
    announced = {
        name: [
            (when, e.delay_s)
            for when, e in world.events
            if e.member == name and e.after is REBUILDING
        ]
        for name in {e.member for _, e in world.events}
    }
    for name, when, _ in world.tried:
        said = announced[name]
        while said and said[0][0] + said[0][1] > when:
            said.pop(0)
        assert any(at + delay <= when for at, delay in said), (name, when)
        said.pop(0)


def check_tries(world: World) -> None:
    """Never more than ``tries`` rebuilds at the same place, nor in a window of 100 s."""
    for name in {who for who, _, _ in world.tried}:
        mine = [(when, reached) for who, when, reached in world.tried if who == name]
        for when, place in mine:
            assert sum(reached == place for _, reached in mine) <= world.tries
            assert sum(0 <= other - when <= 100 for other, _ in mine) <= world.tries


scripts = st.lists(
    st.tuples(st.sampled_from(sorted(ACTIONS)), st.integers(0, 2), st.sampled_from([0, 1, 3, 40])),
    max_size=14,
)


@given(scripts, st.integers(0, 3), st.sampled_from([0, 2]))
def test_whatever_fails_every_member_serves_or_is_gone_in_the_end_and_the_events_say_how(
    script: list[tuple[str, int, int]], tries: int, probes: int
) -> None:
    async def body() -> None:
        world = World(3, tries=tries, probes=probes)
        await settle()
        await played(world, script)
        assert len(world.members.all) == 3
        assert all(member.state in (SERVING, GONE) for member in world.members.all)
        assert all((m.failure is None) == (m.state is SERVING) for m in world.members.all)
        check_events(world)
        check_tries(world)
        check_backoff(world)
        ejected = [(e.member, e.incarnation) for _, e in world.events if e.after is EJECTED]
        assert set(ejected) == set(world.left)
        world.running.cancel()
        await settle()

    asyncio.run(body())


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12), st.integers(1, 4))
def test_deaths_while_rebuilding_come_later_and_to_an_end(pauses: list[int], tries: int) -> None:
    async def body() -> None:
        world = await World.started(tries=tries)
        world.broken = {"m/0"}
        world.members["m/0"].value.dead.set()
        for seconds in pauses:
            await world.advance(seconds)
        await world.advance(2 * 2**tries)
        said = [e.delay_s for _, e in world.events if e.after is REBUILDING]
        assert said == [2 * (2**n - 1) for n in range(tries)]
        assert [when for _, when, _ in world.tried] == [sum(said[: n + 1]) for n in range(tries)]
        assert world.states() == [GONE]
        await settle()

    asyncio.run(body())


async def test_a_member_that_is_rebuilt_for_long_is_waited_for_in_words() -> None:
    world = World(start_s=60, rebuild=lambda member: asyncio.Event().wait())
    lines: list[str] = []
    world.members.waits = Waits(lines.append, world.timer, world.timer.clock)
    world.members.all[0].value.dead.set()
    await world.advance(20)
    assert lines == [
        "waiting for m/0 to serve again (10 s so far, at most 60 s a try)",
        "waiting for m/0 to serve again (20 s so far, at most 60 s a try)",
    ]
    world.running.cancel()


async def test_a_member_that_lost_its_machine_is_rebuilt_at_once_and_never_too_often() -> None:
    async def displaced(member: Any) -> Displaced:
        return Displaced(member.name, "machine-c (10.0.0.3) is lost")

    world = World(tries=1, displaced=displaced)
    for incarnation in range(5):
        await world.dies()
        assert world.members.all[0].serves(incarnation + 1)
    assert {when for _, when, _ in world.tried} == {0.0}
    words = [str(event) for _, event in world.events if event.after is REBUILDING]
    assert set(words) == {"m/0 is being rebuilt, after: m/0: machine-c (10.0.0.3) is lost"}
    world.running.cancel()


async def test_a_rebuild_on_a_machine_that_is_lost_meanwhile_is_no_try() -> None:
    machines = iter([False, False, False, True])

    async def rebuild(member: Any) -> Process:
        if not next(machines):
            raise Displaced(member.name, "machine-c (10.0.0.3) is lost")
        return Process(member.name, 1)

    world = World(tries=1, rebuild=rebuild)
    await world.dies()
    assert world.members.all[0].serves(1)
    world.running.cancel()


async def test_a_member_without_a_place_is_built_once_it_has_one_and_no_try_is_burned() -> None:
    places = FakePlaces(0)
    world = World(2, tries=0, places=places)
    world.running.cancel()
    members = MemberSet("world", {"m/0": Process("m/0"), "m/1": None}, world.members.policy)
    members.timer, members.clock = world.timer, world.timer.clock
    running = asyncio.create_task(members.run())
    await settle()
    assert [member.state for member in members.all] == [SERVING, ABSENT]
    assert [member.name for member in members.present] == ["m/0"]
    await world.advance(1000)
    assert world.tried == []  # nothing is waited for with a bound
    places.give(1)
    await settle()
    assert [member.state for member in members.all] == [SERVING, SERVING]
    running.cancel()


async def test_a_member_whose_node_drains_gives_back_first_and_is_no_failure() -> None:
    places = FakePlaces(0, 1)
    world = await World.started(2, tries=0, places=places)
    places.words = {1: "machine-c drains"}
    places.there.discard(1)
    await world.advance(2)
    assert world.states() == [SERVING, ABSENT]
    assert (world.left, world.members.failures) == ([("m/1", 0)], 0)
    assert world.messages == [
        "m/1 is ejected: m/1: machine-c drains",
        "m/1 has left its place: m/1: machine-c drains",
    ]
    places.words = {}
    places.give(1)
    await settle()
    assert world.states() == [SERVING, SERVING]
    assert world.members["m/1"].incarnation == 1


async def test_a_member_that_lost_its_machine_is_absent_until_it_has_another_place() -> None:
    async def displaced(member: Any) -> Displaced:
        return Displaced(member.name, "machine-c is lost")

    places = FakePlaces()
    world = await World.started(1, tries=0, displaced=displaced, places=places)
    await world.dies()
    await world.advance(1000)
    assert world.states() == [ABSENT]
    places.give(0)
    await settle()
    assert world.states() == [SERVING]


async def test_a_member_that_loses_its_place_while_it_is_rebuilt_is_absent_again() -> None:
    places, lost = FakePlaces(0), [Displaced("m/0", "machine-c is lost")]

    async def rebuild(member: Any) -> Process:
        if lost:
            places.there.clear()
            raise lost.pop()
        return Process(member.name, 1)

    world = await World.started(1, tries=1, rebuild=rebuild, places=places)
    await world.dies()
    assert world.states() == [ABSENT]
    places.give(0)
    await settle()
    assert world.states() == [SERVING]


async def test_a_member_that_is_rebuilt_on_a_node_that_begins_to_drain_is_absent_again() -> None:
    places, ready = FakePlaces(0), asyncio.Event()

    async def rebuild(member: Any) -> Process:
        await ready.wait()
        return Process(member.name, 1)

    world = await World.started(1, tries=1, rebuild=rebuild, places=places)
    await world.dies()
    places.words = {0: "machine-c drains"}
    places.there.clear()
    await world.advance(4)
    assert world.states() == [ABSENT]
    places.words = {}
    places.give(0)
    ready.set()
    await settle()
    assert world.states() == [SERVING]


async def test_a_rebuilt_member_with_a_place_serves_at_once() -> None:
    seen: list[State] = []

    async def rebuild(member: Any) -> Process:
        asyncio.get_running_loop().call_soon(lambda: seen.append(member.state))
        return Process(member.name, 1)

    world = await World.started(1, rebuild=rebuild, places=FakePlaces(0))
    await world.dies()
    assert seen == [SERVING]


def restarts(tries: int = 3, window_s: float = 10) -> tuple[Restarts, ManualTimer]:
    timer = ManualTimer()
    supervision = SupervisionConfig(max_restarts=tries, window_s=window_s, delay_s=2)
    return Restarts(supervision, timer.clock), timer


@pytest.mark.parametrize(
    ("tries", "deaths", "delays"),
    [
        (4, [(0, 0)] * 5, [0, 2, 6, 14, None]),
        (3, [(1000, 7)] * 4, [0, 2, 6, None]),
        (1, [(0, 7), (11, 8)], [0, 0]),
        (2, [(0, 1), (0, 2), (0, 3)], [0, 2, None]),
        (2, [(0, 9), (11, 5), (11, 8)], [0, 2, None]),
    ],
    ids=[
        "each comes later than the one before",
        "at the same place none is forgotten however long it takes",
        "one is forgotten after its time once something newer was reached",
        "too many in a short time although each went further",
        "the same place again after a rewind is nothing new",
    ],
)
def test_delays_by_the_seconds_and_the_place_of_each_death(
    tries: int, deaths: list[tuple[float, int]], delays: list[float | None]
) -> None:
    made, timer = restarts(tries)
    found = []
    for seconds, reached in deaths:
        timer.now += seconds
        found.append(made.next_delay(reached))
    assert found == delays


@given(
    tries=st.integers(0, 4),
    deaths=st.lists(st.tuples(st.floats(0, 30), st.integers(0, 2)), max_size=30),
)
def test_never_more_than_tries_in_a_window_or_without_anything_new(
    tries: int, deaths: list[tuple[float, int]]
) -> None:
    made, timer = restarts(tries)
    granted: list[tuple[float, int]] = []
    reached = 0
    for seconds, done in deaths:
        timer.now += seconds
        reached += done
        if made.next_delay(reached) is not None:
            granted.append((timer.now, reached))
    for when, then in granted:
        assert sum(0 <= other - when <= 10 for other, _ in granted) <= max(tries, 1) * bool(tries)
        assert sum(place == then for _, place in granted) <= tries
