"""The weight sync's state machine on fakes: order, rank offsets, and every way to fail."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.core.errors import ProcessDied, StageError, WeightSyncError
from async_opd.processes.members import Member, MemberSet, Policy
from async_opd.weight_sync.coordinator import BroadcastSync
from async_opd.weight_sync.layout import WeightMeta
from tests.world.clock import settle
from tests.world.sync import META, Receiver, Sender


def pool(*receivers: Receiver) -> MemberSet[Any]:
    """The receivers as members, each rebuilt at most once."""
    named = {f"student/{index}": receiver for index, receiver in enumerate(receivers)}
    return MemberSet("rollout", named, Policy(supervision=SupervisionConfig(max_restarts=1)))


class Sync(BroadcastSync):
    """A weight sync whose members the tests see."""

    def __init__(self, sender: Sender, members: MemberSet[Any], *given: Any, **more: Any) -> None:
        super().__init__(sender, members, *given, **more)
        self.members = members


def sync(
    events: list[str],
    receivers: Sequence[Receiver],
    timeout_s: float = 5.0,
    rolling: bool = False,
    tries: int = 1,
    workers: Sequence[int] = (),
    sender: Sender | None = None,
    **more: Any,
) -> Sync:
    """To engines of one worker each, unless ``workers`` says how many."""
    sender = sender or Sender(events)
    sender.receivers = receivers
    return Sync(
        sender,
        pool(*receivers),
        workers or [1] * len(receivers),
        **{"on_sync": "keep"} | more,
        timeout_s=timeout_s,
        rolling=rolling,
        tries=tries,
    )


async def pushed(weights: Sync, version: int = 1) -> dict[str, float]:
    """The metrics of a sync."""
    await weights.snapshot(version)
    return dict((await weights.push()).metrics)


def lost(weights: Sync) -> dict[int, str]:
    """Who was lost, and why."""
    return {m.index: str(m.failure) for m in weights.members.all if m.failure is not None}


def lose(weights: Sync, index: int) -> Member[Any]:
    """Member ``index`` fails, if it has not yet."""
    member = weights.members.all[index]
    weights.members.fail(member, member.incarnation, StageError(member.name, "its process died"))
    return member


async def rejoin(weights: Sync, index: int, newcomer: Receiver) -> None:
    """Member ``index`` is rebuilt. Raises why it is not."""

    async def rebuild(member: Member[Any]) -> Receiver:
        await weights.rejoin(member.index, newcomer, 1)
        return newcomer

    policy = Policy[Any](supervision=SupervisionConfig(max_restarts=1), rebuild=rebuild, needed=99)
    weights.members.policy = policy
    await weights.members.mend(lose(weights, index))


ONE = ["pause keep", "send", "receive", "finish 3", "resume"]


@pytest.mark.parametrize("rolling", [False, True])
async def test_a_push_pauses_sends_and_resumes_one_after_the_other(rolling: bool) -> None:
    events: list[str] = []
    receivers = [Receiver(events) for _ in range(1 + rolling)]
    await pushed(sync(events, receivers, rolling=rolling), 3)
    assert events == ["snapshot 3", *ONE * len(receivers)]


@pytest.mark.parametrize(
    ("rolling", "worlds", "offsets"), [(False, [8], [1, 3, 7]), (True, [3, 5, 2], [1, 1, 1])]
)
async def test_ranks_of_the_replicas_do_not_collide_and_rolling_each_has_a_separate_group(
    rolling: bool, worlds: list[int], offsets: list[int]
) -> None:
    receivers, sender = [Receiver() for _ in range(3)], Sender()
    await sync([], receivers, rolling=rolling, workers=[2, 4, 1], sender=sender).connect()
    assert (sender.worlds, [receiver.offset for receiver in receivers]) == (worlds, offsets)


async def test_a_trainer_that_hangs_in_its_snapshot_is_as_good_as_dead() -> None:
    class Hanging(Sender):
        async def snapshot(self, version: int, compare: bool = False) -> WeightMeta:
            return await asyncio.get_running_loop().create_future()

    weights = sync([], [], timeout_s=0.01, sender=Hanging())
    with pytest.raises(ProcessDied, match=r"trainer: it hangs: the snapshot took longer than"):
        await weights.snapshot(1)


@pytest.mark.parametrize("generates", [(100, 100), (500, 0)])
async def test_finish_waits_while_tokens_come(generates: tuple[int, int]) -> None:
    """100: ten looks, of four within the bound."""
    receivers = [Receiver(), Receiver()]
    for receiver, tokens in zip(receivers, generates, strict=True):
        receiver.finished.clear()
        receiver.generates = tokens
    weights = sync([], receivers, timeout_s=0.04, on_sync="finish")
    await pushed(weights)
    silent = [index for index, tokens in enumerate(generates) if not tokens]
    assert list(lost(weights)) == silent
    assert [receiver.version for receiver in receivers] == [int(bool(one)) for one in generates]
    for cause in lost(weights).values():
        assert "student/1: finishing: no new token for 0.04 s" in cause
        assert "raise sync.timeout_s if tokens can be so far apart" in cause


async def test_a_replica_that_died_is_left_out_of_a_new_group() -> None:
    receivers, sender = [Receiver(), Receiver(fail="pause keep"), Receiver()], Sender()
    weights = sync([], receivers, workers=[1, 2, 1], sender=sender)
    await weights.connect()
    lose(weights, 1)
    await pushed(weights)
    assert (sender.worlds, receivers[2].offset) == ([5, 3], 2)


async def test_a_rolling_sync_passes_over_a_replica_that_died_meanwhile() -> None:
    class Killer(Receiver):
        async def resume(self) -> None:
            lose(weights, 1)
            await super().resume()

    weights = sync([], [Killer(), Receiver(fail="pause keep")], rolling=True)
    await weights.connect()
    await weights.snapshot(1)
    assert (await weights.push()).version == 1


class Time:
    """Seconds pass when a part of a sync takes some."""

    now = 0.0

    def __call__(self) -> float:
        return self.now

    def slow(self, of: Any, **seconds: float) -> Any:
        """The same, but these methods take so long."""
        for name, takes in seconds.items():
            method = getattr(of, name)

            async def late(*given: Any, method: Any = method, takes: float = takes) -> Any:
                self.now += takes
                return await method(*given)

            setattr(of, name, late)
        return of


async def test_the_report_has_the_seconds_of_parts_sender_and_stalls() -> None:
    time = Time()
    receivers = [time.slow(Receiver(), pause=1, receive=2, resume=4) for _ in range(2)]
    sender = time.slow(Sender(), send=8)
    weights = sync([], receivers, rolling=True, sender=sender, clock=time)
    for version in (1, 2):  # the second report begins anew
        metrics = await pushed(weights, version)
        parts = ("pause", "transfer", "resume", "send", "collective")
        found = [metrics[f"sync/{part}_s"] for part in parts]
        assert found == [2, 2 * (2 + 8), 8, 16, 0.5]
        assert metrics["sync/seconds"] == 30
        assert [metrics[f"sync/student/{index}/stall_s"] for index in (0, 1)] == [15, 15]
        assert metrics["sync/mib"] == 24 / 2**20  # of one copy


PARTS = ["pause keep", "receive", "finish 1", "resume"]


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize(
    ("fault", "cause"), [("fail", "broken pipe"), ("hang", "took longer than 0.2 s")]
)
async def test_one_that_fails_or_hangs_is_lost_with_the_part_and_the_cause(
    fault: str, cause: str, part: str, rolling: bool
) -> None:
    weights = sync([], [Receiver(), Receiver(**{fault: part})], timeout_s=0.2, rolling=rolling)
    await pushed(weights)
    assert list(lost(weights)) == [1]
    assert "student/" in lost(weights)[1]
    assert cause in lost(weights)[1]


async def test_a_broken_transfer_leaves_the_old_weights_generating_until_it_is_made_again() -> None:
    receivers = [Receiver(), Receiver()]
    sender = Sender()
    sender.fails = 1
    assert (await pushed(sync([], receivers, tries=2, sender=sender)))["sync/rounds"] == 2
    assert [(r.version, r.paused) for r in receivers] == [(1, False), (1, False)]
    assert sender.worlds == [3, 3]


async def test_who_has_weights_of_two_versions_stays_paused_until_it_has_all_of_one() -> None:
    half, other = Receiver(), Receiver()
    weights = sync([], [half, other], tries=2)
    half.loads, half.aborts = True, 1
    finish, paused = other.finish, []

    async def looks(version: int) -> None:
        paused.append(half.paused)
        await finish(version)

    other.finish = looks
    await pushed(weights)
    assert paused == [True]
    assert lost(weights) == {}
    assert [(r.version, r.paused) for r in (half, other)] == [(1, False), (1, False)]


async def test_it_is_not_resumed_either_when_another_cannot_pause() -> None:
    half, fails = Receiver(), Receiver()
    weights = sync([], [half, fails], tries=1)
    half.loads, half.aborts = True, 1
    await weights.snapshot(1)
    with pytest.raises(WeightSyncError):
        await weights.push()
    fails.fail = "pause keep"
    half.aborts = 9
    with pytest.raises(WeightSyncError):
        await weights.push()
    assert half.paused
    assert list(lost(weights)) == [1]


async def test_a_sender_that_always_fails_ends_the_push_after_so_many_tries() -> None:
    receiver, sender = Receiver(), Sender()
    sender.fails = 9
    with pytest.raises(WeightSyncError, match="connection reset"):
        await pushed(sync([], [receiver], tries=3, sender=sender))
    assert (sender.fails, receiver.paused) == (6, False)


@pytest.mark.parametrize(("fault", "cause"), [("dead", "trainer"), ("hangs", "trainer: it hangs")])
async def test_a_dead_or_hanging_trainer_ends_the_push(fault: str, cause: str) -> None:
    receiver, sender = Receiver(), Sender()
    setattr(sender, fault, True)
    receiver.aborts = 1
    with pytest.raises(ProcessDied, match=cause):
        await pushed(sync([], [receiver], timeout_s=0.2, tries=3, sender=sender))
    assert not receiver.paused


async def test_a_broadcast_is_waited_for_by_its_bytes_too() -> None:
    rate = 0.1 / META.nbytes
    weights = sync([], [Receiver(hang="receive")], timeout_s=0.1, seconds_per_byte=rate)
    await pushed(weights)
    assert "the broadcast to student/0 took longer than 0.2 s" in lost(weights)[0]


async def test_a_push_with_nobody_left_is_done() -> None:
    weights = sync([], [Receiver()])
    lose(weights, 0)
    await weights.snapshot(1)
    assert (await weights.push()).version == 1


@pytest.mark.parametrize("rolling", [False, True])
async def test_who_rejoins_has_the_newest_weights_before_anything_else(rolling: bool) -> None:
    receivers = [Receiver(), Receiver(fail="receive")]
    weights = sync([], receivers, rolling=rolling)
    await pushed(weights, 4)
    newcomer = Receiver()
    await rejoin(weights, 1, newcomer)
    assert (newcomer.version, newcomer.paused) == (4, False)
    await pushed(weights, 5)
    assert (receivers[0].version, newcomer.version) == (5, 5)


async def test_before_the_first_snapshot_who_rejoins_needs_no_weights() -> None:
    weights = sync([], [Receiver(), Receiver()])
    lose(weights, 0)
    newcomer = Receiver()
    await rejoin(weights, 0, newcomer)
    assert newcomer.events == []


@pytest.mark.parametrize("rolling", [False, True])
async def test_who_rejoins_early_meets_before_the_first_push(rolling: bool) -> None:
    weights = sync([], [Receiver()], rolling=rolling)
    await weights.connect()
    lose(weights, 0)
    newcomer = Receiver()
    await rejoin(weights, 0, newcomer)
    await pushed(weights)
    assert newcomer.offset == 1


async def test_who_cannot_rejoin_is_not_part_of_the_next_push() -> None:
    weights = sync([], [Receiver(), Receiver()])
    await weights.snapshot(1)
    lose(weights, 1)
    with pytest.raises(WeightSyncError, match="broken pipe"):
        await rejoin(weights, 1, Receiver(fail="receive"))
    assert (await weights.push()).metrics["sync/rounds"] == 1


async def test_a_push_that_waits_for_a_newcomer_updates_it_too() -> None:
    receivers = [Receiver(), Receiver()]
    weights = sync([], receivers)
    await weights.snapshot(1)
    newcomer = Receiver()
    newcomer.finished.clear()
    joining = asyncio.create_task(rejoin(weights, 1, newcomer))
    await asyncio.sleep(0.01)
    following = asyncio.create_task(weights.snapshot(2))
    pushing = asyncio.create_task(weights.push())
    await asyncio.sleep(0.01)
    newcomer.finished.set()
    await asyncio.gather(joining, following, pushing)
    assert (receivers[0].version, newcomer.version) == (2, 2)


async def test_a_cancelled_rejoin_ends_with_its_transfer_in_which_the_trainer_is() -> None:
    weights = sync([], [Receiver(), Receiver()])
    await weights.snapshot(1)
    newcomer = Receiver()
    newcomer.finished.clear()
    joining = asyncio.create_task(rejoin(weights, 1, newcomer))
    await settle()
    quiet = asyncio.create_task(weights.quiet())
    joining.cancel()
    await settle()
    assert (joining.done(), quiet.done()) == (False, False)
    newcomer.finished.set()
    with pytest.raises(asyncio.CancelledError):
        await joining
    await quiet
    assert newcomer.version == 1


@given(
    parts=st.lists(
        st.sampled_from(["", "", "join", "alive", "abort", "half", *PARTS]), min_size=1, max_size=5
    ),
    hangs=st.lists(st.booleans(), min_size=5, max_size=5),
    rolling=st.booleans(),
)
def test_whatever_fails_everybody_left_generates_with_the_new_version(
    parts: list[str], hangs: list[bool], rolling: bool
) -> None:
    async def body() -> None:
        receivers = []
        for part, hang in zip(parts, hangs, strict=False):
            once = part in ("", "abort", "half", "join")
            receivers.append(Receiver(**({} if once else {"hang" if hang else "fail": part})))
            receivers[-1].aborts, receivers[-1].loads = part in ("abort", "half"), part == "half"
            receivers[-1].fail = receivers[-1].fail or ("join" if part == "join" else "")
        weights = sync([], receivers, 0.01, rolling, tries=3)
        await weights.snapshot(1)
        try:
            await weights.push()
        except WeightSyncError:
            assert "join" in parts  # it answers, but no group comes together: nobody is to blame
            return
        left = set(range(len(parts))) - set(lost(weights))
        assert all(receivers[i].version == 1 and not receivers[i].paused for i in left)
        assert all(parts[i] not in ("", "abort", "half") for i in lost(weights))

    asyncio.run(body())


class TestEvaluators:
    """Members of a pool of their own, whose indices follow those of the rollout replicas."""

    def made(self, rollout: Receiver, *own: Receiver, tries: int = 1) -> Sync:
        self.sender, self.own = Sender(), pool(*own)
        more = {"sender": self.sender, "evaluators": self.own, "workers": [1] * (1 + len(own))}
        coordinator = sync([], [rollout], tries=tries, **more)
        self.sender.receivers = own
        return coordinator

    async def test_they_take_part_in_no_push_and_each_is_refreshed_alone(self) -> None:
        rollout, own = Receiver(), [Receiver(), Receiver()]
        coordinator = self.made(rollout, *own)
        await pushed(coordinator)
        assert [one.version for one in (rollout, *own)] == [1, 0, 0]
        await coordinator.refresh_evaluators()
        assert [one.version for one in own] == [1, 1]
        assert self.sender.worlds == [2, 2, 2]

    async def test_a_snapshot_waits_for_groups_that_connect_beyond_their_callers_bound(
        self,
    ) -> None:
        events: list[str] = []
        slow, come = Receiver(events), asyncio.Event()
        join = slow.join

        async def late(*given: Any) -> None:
            await come.wait()
            await join(*given)

        slow.join = late  # type: ignore[method-assign]
        weights = sync(events, [slow])
        connecting = asyncio.create_task(weights.connect())
        await settle()
        sending = asyncio.create_task(weights.snapshot(1))
        await settle()
        assert not sending.done()
        come.set()
        await asyncio.wait_for(asyncio.gather(connecting, sending), 5)

    async def test_a_refresh_leaves_the_group_of_the_rollout_replicas_connected(self) -> None:
        coordinator = self.made(Receiver(), Receiver())
        for version in (1, 2, 3):
            await pushed(coordinator, version)
            await coordinator.refresh_evaluators()
        assert self.sender.worlds == [2, 2]

    async def test_without_a_snapshot_they_keep_their_weights(self) -> None:
        own = Receiver()
        await self.made(Receiver(), own).refresh_evaluators()
        assert own.events == []

    async def test_one_that_fails_is_ejected_from_its_own_pool(self) -> None:
        own = [Receiver(fail="receive"), Receiver()]
        coordinator = self.made(Receiver(), *own)
        await coordinator.snapshot(1)
        await coordinator.refresh_evaluators()
        assert [member.index for member in self.own.serving] == [1]
        assert own[1].version == 1

    async def test_a_transfer_that_breaks_off_is_made_again(self) -> None:
        own = Receiver()
        coordinator = self.made(Receiver(), own, tries=2)
        await coordinator.snapshot(1)
        self.sender.fails = 1
        await coordinator.refresh_evaluators()
        assert own.version == 1

    async def test_a_trainer_that_dies_meanwhile_is_the_error(self) -> None:
        coordinator = self.made(Receiver(), Receiver())
        await coordinator.snapshot(1)
        self.sender.dead = True
        with pytest.raises(ProcessDied):
            await coordinator.refresh_evaluators()
