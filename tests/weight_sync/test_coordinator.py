"""The weight sync's state machine on fakes: order, rank offsets, and every way to fail."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.core.errors import ProcessDied, StageError, TransferAborted, WeightSyncError
from async_opd.core.reports import Progress
from async_opd.processes.members import Member, MemberSet, Policy
from async_opd.weight_sync.coordinator import BroadcastSync
from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan

META = WeightMeta(("w",), ("float32",), ((2, 3),), (4,))


class Sender:
    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.worlds: list[int] = []
        self.fails = 0  # sends that break, for no receiver's fault
        self.dead = self.hangs = False
        self.receivers: list[Receiver] = []

    async def open(self, group: int, world_size: int, connected: Any) -> Rendezvous:
        self.worlds.append(world_size)
        return Rendezvous("host", 1, world_size, 1.0, 1, b"secret")

    async def connect(self, group: int) -> None: ...

    async def snapshot(self, version: int, compare: bool = False) -> WeightMeta:
        self.events.append(f"snapshot {version}")
        return META

    async def send(self, group: int) -> float:
        if self.hangs:
            await asyncio.Event().wait()
        if self.dead:
            raise ProcessDied("trainer", "its process died")
        if self.fails:
            self.fails -= 1
            for receiver in self.receivers:
                receiver.aborts = 1
            raise RuntimeError("connection reset")
        self.events.append("send")
        return 0.25


class Receiver:
    """``fail`` and ``hang`` name the part that goes wrong; ``aborts`` counts broken transfers.

    With ``loads`` a broken transfer leaves weights of two versions: it refuses to resume.
    """

    def __init__(self, events: list[str], fail: str = "", hang: str = "") -> None:
        self.events, self.fail, self.hang = events, fail, hang
        self.offset = -1
        self.version = 0
        self.aborts = 0
        self.loads = self.mixed = False
        self.paused = False
        self.tokens = self.generates = 0
        self.finished = asyncio.Event()
        self.finished.set()

    async def _do(self, what: str) -> None:
        if self.fail == what:
            raise RuntimeError("broken pipe")
        if self.hang == what:
            await asyncio.Event().wait()
        self.events.append(what)

    async def alive(self) -> None:
        if "alive" in (self.fail, self.hang):
            raise RuntimeError("dead")

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None:
        if self.fail in ("join", "alive"):
            raise RuntimeError("nobody came")
        self.offset = rank_offset

    async def progress(self) -> Progress:
        self.tokens += self.generates
        if self.tokens >= 1000:
            self.finished.set()
        return Progress(self.tokens, 1000)

    async def pause(self, on_sync: str) -> None:
        await self.finished.wait()
        await self._do(f"pause {on_sync}")
        self.paused = True

    async def receive(self, meta: WeightMeta) -> None:
        if self.aborts:
            self.aborts -= 1
            self.mixed = self.loads
            raise TransferAborted("student", "connection reset")
        await self._do("receive")
        self.mixed = False

    async def finish(self, version: int) -> None:
        await self._do(f"finish {version}")
        self.version = version

    async def resume(self) -> None:
        if self.mixed:
            raise TransferAborted("student", "it stays paused")
        await self._do("resume")
        self.paused = False


def pool(*receivers: Receiver) -> MemberSet[Any]:
    """The receivers as members, each rebuilt at most once."""
    named = {f"student/{index}": receiver for index, receiver in enumerate(receivers)}
    return MemberSet("rollout", named, Policy(supervision=SupervisionConfig(max_restarts=1)))


def sync(
    events: list[str],
    receivers: list[Receiver],
    timeout_s: float = 5.0,
    rolling: bool = False,
    tries: int = 1,
) -> BroadcastSync:
    sender = Sender(events)
    sender.receivers = receivers
    return BroadcastSync(
        sender,
        pool(*receivers),
        [1] * len(receivers),
        on_sync="keep",
        timeout_s=timeout_s,
        rolling=rolling,
        tries=tries,
    )


def lost(weights: BroadcastSync) -> dict[int, str]:
    """Who was lost, and why."""
    return {m.index: str(m.failure) for m in weights._members.all if m.failure is not None}


def lose(weights: BroadcastSync, index: int) -> Member[Any]:
    """Member ``index`` fails, if it has not yet."""
    member = weights._members.all[index]
    weights._members.fail(member, member.incarnation, StageError(member.name, "its process died"))
    return member


async def rejoin(weights: BroadcastSync, index: int, newcomer: Receiver) -> None:
    """Member ``index`` is rebuilt. Raises why it is not."""

    async def rebuild(member: Member[Any]) -> Receiver:
        await weights.rejoin(member.index, newcomer, 1)
        return newcomer

    policy = Policy[Any](supervision=SupervisionConfig(max_restarts=1), rebuild=rebuild, needed=99)
    weights._members.policy = policy
    await weights._members.mend(lose(weights, index))


async def test_a_push_pauses_sends_names_and_resumes_in_this_order() -> None:
    events: list[str] = []
    weights = sync(events, [Receiver(events)])
    await weights.snapshot(3)
    await weights.push()
    assert events == ["snapshot 3", "pause keep", "send", "receive", "finish 3", "resume"]


async def test_ranks_of_the_replicas_do_not_collide() -> None:
    receivers = [Receiver([]) for _ in range(3)]
    weights = BroadcastSync(Sender([]), pool(*receivers), [2, 4, 1], on_sync="keep", timeout_s=5)
    await weights.connect()
    assert [receiver.offset for receiver in receivers] == [1, 3, 7]


async def test_a_trainer_that_hangs_in_its_snapshot_is_as_good_as_dead() -> None:
    weights = sync([], [], timeout_s=0.01)

    async def hangs(version: int, compare: bool) -> WeightMeta:
        return await asyncio.get_running_loop().create_future()

    weights._groups._sender.snapshot = hangs  # type: ignore[method-assign]
    with pytest.raises(ProcessDied, match=r"trainer: it hangs: the snapshot took longer than"):
        await weights.snapshot(1)


def finishing(receivers: list[Receiver]) -> BroadcastSync:
    for receiver in receivers:
        receiver.finished.clear()
    return BroadcastSync(
        Sender([]), pool(*receivers), [1] * len(receivers), on_sync="finish", timeout_s=0.04
    )


async def test_finish_waits_for_responses_as_long_as_tokens_come() -> None:
    receivers = [Receiver([]), Receiver([])]
    for receiver in receivers:
        receiver.generates = 100  # ten looks, of four within the bound
    weights = finishing(receivers)
    await weights.snapshot(1)
    await weights.push()
    assert ([receiver.version for receiver in receivers], lost(weights)) == ([1, 1], {})


async def test_finish_loses_a_replica_that_generates_nothing_and_names_the_key() -> None:
    receivers = [Receiver([]), Receiver([])]
    receivers[0].generates = 500
    weights = finishing(receivers)
    await weights.snapshot(1)
    await weights.push()
    assert list(lost(weights)) == [1]
    assert "student/1: finishing: no new token for 0.04 s" in lost(weights)[1]
    assert "raise sync.timeout_s if tokens can be so far apart" in lost(weights)[1]


async def test_rolling_updates_one_replica_after_the_other() -> None:
    events: list[str] = []
    receivers = [Receiver(events), Receiver(events)]
    weights = sync(events, receivers, rolling=True)
    await weights.snapshot(3)
    await weights.push()
    one = ["pause keep", "send", "receive", "finish 3", "resume"]
    assert events == ["snapshot 3", *one, *one]


async def test_rolling_gives_every_replica_a_group_of_its_own() -> None:
    receivers = [Receiver([]) for _ in range(2)]
    sender = Sender([])
    weights = BroadcastSync(
        sender, pool(*receivers), [2, 4], on_sync="keep", timeout_s=5, rolling=True
    )
    await weights.connect()
    assert (sender.worlds, [receiver.offset for receiver in receivers]) == ([3, 5], [1, 1])


async def test_a_replica_that_died_is_left_out_of_a_new_group() -> None:
    receivers = [Receiver([]), Receiver([], fail="pause keep"), Receiver([])]
    sender = Sender([])
    weights = BroadcastSync(sender, pool(*receivers), [1, 2, 1], on_sync="keep", timeout_s=5)
    await weights.connect()
    lose(weights, 1)
    await weights.snapshot(1)
    await weights.push()
    assert (sender.worlds, receivers[2].offset) == ([5, 3], 2)


async def test_a_rolling_sync_passes_over_a_replica_that_died_meanwhile() -> None:
    events: list[str] = []
    dead = Receiver(events, fail="pause keep")
    weights = sync(events, [Receiver(events), dead], rolling=True)
    await weights.connect()
    await weights.snapshot(1)
    first, resume = weights._groups.receivers[0], weights._groups.receivers[0].resume

    async def resume_while_the_other_dies() -> None:
        lose(weights, 1)
        await resume()

    first.resume = resume_while_the_other_dies  # type: ignore[method-assign]
    assert (await weights.push()).version == 1


async def test_the_report_tells_how_long_each_replica_stood_still() -> None:
    time = [0.0]

    class Slow(Receiver):
        async def receive(self, meta: WeightMeta) -> None:
            time[0] += 2.0
            await super().receive(meta)

    receivers = [Slow([]), Slow([])]
    weights = BroadcastSync(
        Sender([]),
        pool(*receivers),
        [1, 1],
        on_sync="keep",
        timeout_s=5,
        rolling=True,
        clock=lambda: time[0],
    )
    await weights.snapshot(1)
    metrics = (await weights.push()).metrics
    assert (metrics["sync/student/0/stall_s"], metrics["sync/student/1/stall_s"]) == (2.0, 2.0)
    assert metrics["sync/seconds"] == 4.0


async def test_the_report_tells_the_seconds_of_the_sender_and_of_its_collectives() -> None:
    time = [0.0]

    class Slow(Sender):
        async def send(self, group: int) -> float:
            time[0] += 2.0
            return await super().send(group)

    receivers = [Receiver([]), Receiver([]), Receiver([])]
    weights = BroadcastSync(
        Slow([]),
        pool(*receivers),
        [1, 1, 1],
        on_sync="keep",
        timeout_s=5,
        rolling=True,
        clock=lambda: time[0],
    )
    for version in (1, 2):  # the second report begins anew
        await weights.snapshot(version)
        metrics = (await weights.push()).metrics
        assert (metrics["sync/send_s"], metrics["sync/collective_s"]) == (6.0, 0.75)


async def test_the_report_splits_a_sync_into_pause_transfer_and_resume() -> None:
    time = [0.0]

    class Slow(Receiver):
        async def pause(self, on_sync: str) -> None:
            time[0] += 1.0
            await super().pause(on_sync)

        async def receive(self, meta: WeightMeta) -> None:
            time[0] += 2.0
            await super().receive(meta)

        async def resume(self) -> None:
            time[0] += 4.0
            await super().resume()

    weights = BroadcastSync(
        Sender([]), pool(Slow([])), [1], on_sync="keep", timeout_s=5, clock=lambda: time[0]
    )
    await weights.snapshot(1)
    metrics = (await weights.push()).metrics
    parts = [metrics[f"sync/{part}_s"] for part in ("pause", "transfer", "resume")]
    assert parts == [1.0, 2.0, 4.0]
    assert metrics["sync/seconds"] == 7.0


async def test_the_report_counts_the_bytes_of_one_copy() -> None:
    weights = sync([], [Receiver([]), Receiver([])])
    await weights.snapshot(1)
    assert (await weights.push()).metrics["sync/mib"] == 24 / 2**20


PARTS = ["pause keep", "receive", "finish 1", "resume"]


@pytest.mark.parametrize("rolling", [False, True])
@pytest.mark.parametrize("part", PARTS)
async def test_who_fails_is_lost_with_the_part_and_the_cause(part: str, rolling: bool) -> None:
    weights = sync([], [Receiver([]), Receiver([], fail=part)], rolling=rolling)
    await weights.snapshot(1)
    await weights.push()
    assert list(lost(weights)) == [1]
    assert "student/" in lost(weights)[1]
    assert "broken pipe" in lost(weights)[1]


@pytest.mark.parametrize("part", PARTS)
async def test_who_hangs_is_lost_after_the_bound(part: str) -> None:
    weights = sync([], [Receiver([]), Receiver([], hang=part)], timeout_s=0.2)
    await weights.snapshot(1)
    await weights.push()
    assert list(lost(weights)) == [1]
    assert "took longer than 0.2 s" in lost(weights)[1]


@pytest.mark.parametrize("part", ["pause keep", "finish 1", "resume", "join"])
async def test_the_others_have_the_new_version_in_the_end(part: str) -> None:
    healthy, fails = Receiver([]), Receiver([], fail=part)
    weights = sync([], [healthy, fails], tries=2)
    await weights.snapshot(1)
    if part == "join":
        fails.fail = "alive"  # its process is gone
    await weights.push()
    assert (healthy.version, healthy.paused) == (1, False)


async def test_a_broken_transfer_leaves_the_old_weights_generating_until_it_is_made_again() -> None:
    receivers = [Receiver([]), Receiver([])]
    weights = sync([], receivers, tries=2)
    assert isinstance(weights._groups._sender, Sender)
    weights._groups._sender.fails = 1
    await weights.snapshot(1)
    report = await weights.push()
    assert report.metrics["sync/rounds"] == 2
    assert [(r.version, r.paused) for r in receivers] == [(1, False), (1, False)]
    assert weights._groups._sender.worlds == [3, 3]


async def test_who_has_weights_of_two_versions_stays_paused_until_it_has_all_of_one() -> None:
    half, other = Receiver([]), Receiver([])
    weights = sync([], [half, other], tries=2)
    half.loads, half.aborts = True, 1
    finish, paused = other.finish, []

    async def looks(version: int) -> None:
        paused.append(half.paused)
        await finish(version)

    other.finish = looks  # type: ignore[method-assign]
    await weights.snapshot(1)
    await weights.push()
    assert paused == [True]
    assert lost(weights) == {}
    assert [(r.version, r.paused) for r in (half, other)] == [(1, False), (1, False)]


async def test_it_is_not_resumed_either_when_another_cannot_pause() -> None:
    half, fails = Receiver([]), Receiver([])
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
    receivers = [Receiver([])]
    weights = sync([], receivers, tries=3)
    assert isinstance(weights._groups._sender, Sender)
    weights._groups._sender.fails = 9
    await weights.snapshot(1)
    with pytest.raises(WeightSyncError, match="connection reset"):
        await weights.push()
    assert weights._groups._sender.fails == 6
    assert not receivers[0].paused


async def test_a_dead_trainer_ends_the_push_at_once_and_the_replicas_go_on() -> None:
    receivers = [Receiver([])]
    weights = sync([], receivers, tries=3)
    assert isinstance(weights._groups._sender, Sender)
    weights._groups._sender.dead = True
    receivers[0].aborts = 1
    await weights.snapshot(1)
    with pytest.raises(ProcessDied, match="trainer"):
        await weights.push()
    assert not receivers[0].paused


async def test_a_broadcast_is_waited_for_by_its_bytes_too() -> None:
    receivers = [Receiver([], hang="receive")]
    weights = BroadcastSync(
        Sender([]),
        pool(*receivers),
        [1],
        on_sync="keep",
        timeout_s=0.1,
        seconds_per_byte=0.1 / META.nbytes,
    )
    await weights.snapshot(1)
    await weights.push()
    assert "the broadcast to student/0 took longer than 0.2 s" in lost(weights)[0]


async def test_a_trainer_that_hangs_beyond_its_own_bound_is_taken_for_dead() -> None:
    receivers = [Receiver([])]
    weights = sync([], receivers, timeout_s=0.2)
    assert isinstance(weights._groups._sender, Sender)
    weights._groups._sender.hangs = True
    await weights.snapshot(1)
    with pytest.raises(ProcessDied, match="trainer: it hangs"):
        await weights.push()


async def test_a_push_with_nobody_left_is_done() -> None:
    weights = sync([], [Receiver([])])
    lose(weights, 0)
    await weights.snapshot(1)
    assert (await weights.push()).version == 1


@pytest.mark.parametrize("rolling", [False, True])
async def test_who_rejoins_has_the_newest_weights_before_anything_else(rolling: bool) -> None:
    receivers = [Receiver([]), Receiver([], fail="receive")]
    weights = sync([], receivers, rolling=rolling)
    await weights.snapshot(4)
    await weights.push()
    newcomer = Receiver([])
    await rejoin(weights, 1, newcomer)
    assert (newcomer.version, newcomer.paused) == (4, False)
    await weights.snapshot(5)
    await weights.push()
    assert (receivers[0].version, newcomer.version) == (5, 5)


async def test_before_the_first_snapshot_who_rejoins_needs_no_weights() -> None:
    weights = sync([], [Receiver([]), Receiver([])])
    lose(weights, 0)
    newcomer = Receiver([])
    await rejoin(weights, 0, newcomer)
    assert newcomer.events == []


@pytest.mark.parametrize("rolling", [False, True])
async def test_who_rejoins_before_the_first_snapshot_meets_before_the_first_push(
    rolling: bool,
) -> None:
    weights = sync([], [Receiver([])], rolling=rolling)
    await weights.connect()
    lose(weights, 0)
    newcomer = Receiver([])
    await rejoin(weights, 0, newcomer)
    await weights.snapshot(1)
    await weights.push()
    assert newcomer.offset == 1


async def test_who_cannot_rejoin_is_not_part_of_the_next_push() -> None:
    weights = sync([], [Receiver([]), Receiver([])])
    await weights.snapshot(1)
    lose(weights, 1)
    with pytest.raises(WeightSyncError, match="broken pipe"):
        await rejoin(weights, 1, Receiver([], fail="receive"))
    assert (await weights.push()).metrics["sync/rounds"] == 1


async def test_a_push_that_waits_for_a_newcomer_updates_it_too() -> None:
    receivers = [Receiver([]), Receiver([])]
    weights = sync([], receivers)
    await weights.snapshot(1)
    newcomer = Receiver([])
    newcomer.finished.clear()
    joining = asyncio.create_task(rejoin(weights, 1, newcomer))
    await asyncio.sleep(0.01)
    following = asyncio.create_task(weights.snapshot(2))
    pushing = asyncio.create_task(weights.push())
    await asyncio.sleep(0.01)
    newcomer.finished.set()
    await asyncio.gather(joining, following, pushing)
    assert (receivers[0].version, newcomer.version) == (2, 2)


async def test_a_replica_that_received_half_of_the_weights_is_not_resumed() -> None:
    events: list[str] = []
    weights = sync(events, [Receiver(events, fail="receive")])
    await weights.snapshot(1)
    await weights.push()
    assert "resume" not in events


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
            receivers.append(Receiver([], **({} if once else {"hang" if hang else "fail": part})))
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


def test_chunks_cover_every_tensor_once_in_order() -> None:
    plan = chunk_plan([5, 5, 20, 1, 1, 9], 10)
    assert plan == [range(2), range(2, 3), range(3, 5), range(5, 6)]


def test_no_tensors_need_no_chunk() -> None:
    assert chunk_plan([], 10) == []


class TestEvaluators:
    """Members of a pool of their own, whose indices follow those of the rollout replicas."""

    def made(
        self, events: list[str], rollout: Receiver, *own: Receiver, tries: int = 1
    ) -> BroadcastSync:
        self.sender, self.own = Sender(events), pool(*own)
        self.sender.receivers = list(own)
        return BroadcastSync(
            self.sender,
            pool(rollout),
            [1] * (1 + len(own)),
            on_sync="keep",
            timeout_s=5.0,
            tries=tries,
            evaluators=self.own,
        )

    async def test_they_take_part_in_no_push_and_each_is_refreshed_alone(self) -> None:
        rollout, own = Receiver([]), [Receiver([]), Receiver([])]
        coordinator = self.made([], rollout, *own)
        await coordinator.snapshot(1)
        await coordinator.push()
        assert [one.version for one in (rollout, *own)] == [1, 0, 0]
        await coordinator.refresh_evaluators()
        assert [one.version for one in own] == [1, 1]
        assert self.sender.worlds == [2, 2, 2]

    async def test_a_refresh_leaves_the_group_of_the_rollout_replicas_connected(self) -> None:
        coordinator = self.made([], Receiver([]), Receiver([]))
        for version in (1, 2, 3):
            await coordinator.snapshot(version)
            await coordinator.push()
            await coordinator.refresh_evaluators()
        assert self.sender.worlds == [2, 2]

    async def test_without_a_snapshot_they_keep_their_weights(self) -> None:
        own = Receiver([])
        await self.made([], Receiver([]), own).refresh_evaluators()
        assert own.events == []

    async def test_one_that_fails_is_ejected_from_its_own_pool(self) -> None:
        own = [Receiver([], fail="receive"), Receiver([])]
        coordinator = self.made([], Receiver([]), *own)
        await coordinator.snapshot(1)
        await coordinator.refresh_evaluators()
        assert [member.index for member in self.own.serving] == [1]
        assert own[1].version == 1

    async def test_a_transfer_that_breaks_off_is_made_again(self) -> None:
        own = Receiver([])
        coordinator = self.made([], Receiver([]), own, tries=2)
        await coordinator.snapshot(1)
        self.sender.fails = 1
        await coordinator.refresh_evaluators()
        assert own.version == 1

    async def test_a_trainer_that_dies_meanwhile_is_the_error(self) -> None:
        coordinator = self.made([], Receiver([]), Receiver([]))
        await coordinator.snapshot(1)
        self.sender.dead = True
        with pytest.raises(ProcessDied):
            await coordinator.refresh_evaluators()
