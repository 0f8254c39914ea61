"""The weight sync's state machine on fakes: order, rank offsets, and every way to fail."""

from __future__ import annotations

import asyncio

import pytest

from async_opd.core.errors import WeightSyncError
from async_opd.core.weight_sync import BroadcastSync
from async_opd.core.weights import Rendezvous, WeightMeta, chunk_plan

META = WeightMeta(("w",), ("float32",), ((2, 3),), (4,))


class Sender:
    def __init__(self, events: list[str]) -> None:
        self.events = events
        self.worlds: list[int] = []

    async def open(self, wave: int, world_size: int) -> Rendezvous:
        self.worlds.append(world_size)
        return Rendezvous("host", 1, world_size, 1.0, 1)

    async def connect(self, wave: int) -> None: ...

    async def snapshot(self, version: int) -> WeightMeta:
        self.events.append(f"snapshot {version}")
        return META

    async def send(self, wave: int) -> None:
        self.events.append("send")


class Receiver:
    def __init__(self, events: list[str], fail: str = "", hang: str = "") -> None:
        self.events, self.fail, self.hang = events, fail, hang
        self.offset = -1

    async def _do(self, what: str) -> None:
        if self.fail == what:
            raise RuntimeError("broken pipe")
        if self.hang == what:
            await asyncio.Event().wait()
        self.events.append(what)

    async def join(self, rendezvous: Rendezvous, rank_offset: int) -> None:
        self.offset = rank_offset

    async def pause(self, on_sync: str) -> None:
        await self._do(f"pause {on_sync}")

    async def receive(self, meta: WeightMeta) -> None:
        await self._do("receive")

    async def finish(self, version: int) -> None:
        await self._do(f"finish {version}")

    async def resume(self) -> None:
        await self._do("resume")


def sync(
    events: list[str], receivers: list[Receiver], timeout_s: float = 5.0, rolling: bool = False
) -> BroadcastSync:
    return BroadcastSync(
        Sender(events),
        receivers,
        [1] * len(receivers),
        on_sync="keep",
        timeout_s=timeout_s,
        rolling=rolling,
    )


async def test_a_push_pauses_sends_names_and_resumes_in_this_order() -> None:
    events: list[str] = []
    weights = sync(events, [Receiver(events)])
    await weights.snapshot(3)
    await weights.push()
    assert events == ["snapshot 3", "pause keep", "send", "receive", "finish 3", "resume"]


async def test_ranks_of_the_replicas_do_not_collide() -> None:
    receivers = [Receiver([]) for _ in range(3)]
    weights = BroadcastSync(Sender([]), receivers, [2, 4, 1], on_sync="keep", timeout_s=5)
    await weights.connect()
    assert [receiver.offset for receiver in receivers] == [1, 3, 7]


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
    weights = BroadcastSync(sender, receivers, [2, 4], on_sync="keep", timeout_s=5, rolling=True)
    await weights.connect()
    assert (sender.worlds, [receiver.offset for receiver in receivers]) == ([3, 5], [1, 1])


async def test_a_replica_that_died_is_left_out_of_a_new_group() -> None:
    receivers = [Receiver([]), Receiver([], fail="pause keep"), Receiver([])]
    sender = Sender([])
    weights = BroadcastSync(sender, receivers, [1, 2, 1], on_sync="keep", timeout_s=5)
    await weights.connect()
    weights.lose(1)
    await weights.snapshot(1)
    await weights.push()
    assert (sender.worlds, receivers[2].offset) == ([5, 3], 2)


async def test_a_rolling_sync_passes_over_a_replica_that_died_meanwhile() -> None:
    events: list[str] = []
    dead = Receiver(events, fail="pause keep")
    weights = sync(events, [Receiver(events), dead], rolling=True)
    await weights.connect()
    await weights.snapshot(1)
    first, resume = weights._receivers[0], weights._receivers[0].resume

    async def resume_while_the_other_dies() -> None:
        weights.lose(1)
        await resume()

    first.resume = resume_while_the_other_dies  # type: ignore[method-assign]
    assert (await weights.push()).version == 1


async def test_the_report_tells_how_long_each_replica_stood_still() -> None:
    ticks = iter(range(100))
    receivers = [Receiver([]), Receiver([])]
    weights = BroadcastSync(
        Sender([]),
        receivers,
        [1, 1],
        on_sync="keep",
        timeout_s=5,
        rolling=True,
        clock=lambda: float(next(ticks)),
    )
    await weights.snapshot(1)
    metrics = (await weights.push()).metrics
    assert (metrics["sync/student/0/stall_s"], metrics["sync/student/1/stall_s"]) == (3.0, 3.0)
    assert metrics["sync/seconds"] == 9.0


async def test_a_failure_names_the_replica_it_happened_on() -> None:
    weights = sync([], [Receiver([]), Receiver([], fail="receive")], rolling=True)
    await weights.snapshot(1)
    with pytest.raises(WeightSyncError, match="the broadcast to student/1"):
        await weights.push()


async def test_the_report_counts_the_bytes_of_one_copy() -> None:
    weights = sync([], [Receiver([]), Receiver([])])
    await weights.snapshot(1)
    assert (await weights.push()).nbytes == 24


@pytest.mark.parametrize("part", ["pause keep", "receive", "finish 1", "resume"])
async def test_a_failing_part_is_named_with_its_cause(part: str) -> None:
    weights = sync([], [Receiver([], fail=part)])
    await weights.snapshot(1)
    with pytest.raises(WeightSyncError, match="broken pipe"):
        await weights.push()


@pytest.mark.parametrize("part", ["pause keep", "receive", "finish 1", "resume"])
async def test_a_hanging_part_ends_in_a_timeout_that_names_it(part: str) -> None:
    weights = sync([], [Receiver([], hang=part)], timeout_s=0.01)
    await weights.snapshot(1)
    with pytest.raises(WeightSyncError, match=r"took longer than 0\.01 s"):
        await weights.push()


async def test_a_replica_that_received_half_of_the_weights_is_not_resumed() -> None:
    events: list[str] = []
    weights = sync(events, [Receiver(events, fail="receive")])
    await weights.snapshot(1)
    with pytest.raises(WeightSyncError):
        await weights.push()
    assert "resume" not in events


def test_chunks_cover_every_tensor_once_in_order() -> None:
    plan = chunk_plan([5, 5, 20, 1, 1, 9], 10)
    assert plan == [range(2), range(2, 3), range(3, 5), range(5, 6)]


def test_no_tensors_need_no_chunk() -> None:
    assert chunk_plan([], 10) == []
