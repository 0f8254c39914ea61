"""Which thread does what: torch's current CUDA stream belongs to a thread."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.trainer.models import bare_stage
from tests.world.clock import settle
from trainer.follower import Follower
from trainer.work_thread import WorkThread, ahead


class Threads:
    """Any learner, publisher or rank: notes the thread on which each method was called."""

    def __init__(self, **returns: Any) -> None:
        self.seen: dict[str, int] = {}
        self.returns = returns

    def __getattr__(self, method: str) -> Any:
        def call(*_: Any) -> Any:
            self.seen[method] = threading.get_ident()
            return self.returns.get(method)

        return call


class Batcher:
    """One empty batch."""

    duplicates = duplicate_tokens = 0

    async def take(self, version: int) -> Any:
        return SimpleNamespace(headers=(), samples=(), requeued=())

    async def done(self) -> None: ...

    def copy_held(self) -> Any:
        held = asyncio.get_running_loop().create_future()
        held.set_result(())
        return held

    def hold(self, samples: Any) -> None: ...

    async def queued(self, uids: Any) -> AsyncIterator[Any]:
        return
        yield


async def used(tmp_path: Path) -> tuple[dict[str, int], dict[str, int]]:
    """The threads of a stage's learner, and those of its publisher, after a call of everything."""
    learner: Any = Threads(
        train_batch=SimpleNamespace(metrics={}, skipped="", notes=()),
        capture=0,
        write={},
        restore=(1, 1),
    )
    publisher: Any = Threads()
    batcher: Any = Batcher()
    stage = bare_stage(learner, batcher, publisher)
    for step in range(3):  # a pool would take another thread for what overlaps
        await stage.open(0, 2, ())
        await asyncio.gather(stage.connect(0), stage.step(), stage.snapshot(step), stage.sleep())
        await asyncio.gather(stage.send(0), stage.capture(), stage.save(str(tmp_path)))
        await stage.wake()
    await stage.checkpoint(str(tmp_path), frozenset())
    await stage.restore(str(tmp_path))
    return learner.seen, publisher.seen


async def test_all_training_runs_on_one_thread_and_all_sending_on_another(tmp_path: Path) -> None:
    trains, sends = await used(tmp_path)
    assert trains.pop("write") not in trains.values()  # beside training
    assert {"train_batch", "capture", "save", "restore", "free_cache"} == trains.keys()
    threads = {*trains.values(), sends.pop("snapshot")}
    assert len(threads) == 1
    assert sends.keys() == {"open", "connect", "send"}
    assert len(set(sends.values())) == 1
    assert not threads & {*sends.values(), threading.get_ident()}


async def test_a_step_that_is_cancelled_while_its_thread_trains_counts_with_its_weights() -> None:
    """Ray cancels the call of an interrupted run; the last checkpoint comes after it."""
    begun, go_on = threading.Event(), threading.Event()

    def train(*_: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return SimpleNamespace(metrics={}, skipped="", notes=())

    learner: Any = SimpleNamespace(train_batch=train, capture=lambda version: 0)
    batcher: Any = Batcher()
    stage = bare_stage(learner, batcher)
    step = asyncio.create_task(stage.step())
    await asyncio.to_thread(begun.wait, 30)
    step.cancel()
    captured = asyncio.create_task(stage.capture())
    await settle()
    go_on.set()
    found = await captured
    assert step.cancelled()
    assert (found.step, found.report and found.report.step) == (1, 1)


async def test_a_follower_computes_on_one_thread() -> None:
    rank: Any = Threads(backward=SimpleNamespace(reports=(), norm=0.0))
    follower = Follower(rank)
    for _ in range(3):
        await asyncio.gather(follower.backward(), follower.free_cache(), follower.backward())
    assert rank.seen.keys() == {"backward", "free_cache"}
    assert len(set(rank.seen.values()) - {threading.get_ident()}) == 1


async def test_calls_run_in_the_order_they_come() -> None:
    order: list[int] = []
    thread, go_on = WorkThread("t"), threading.Event()
    first = asyncio.ensure_future(thread.run(go_on.wait, 5))
    rest = [asyncio.ensure_future(thread.run(order.append, index)) for index in range(5)]
    await settle()
    go_on.set()
    await asyncio.gather(first, *rest)
    assert order == [0, 1, 2, 3, 4]


async def test_a_call_that_is_cancelled_before_it_began_never_begins() -> None:
    ran: list[int] = []
    thread, go_on = WorkThread("t"), threading.Event()
    first = asyncio.ensure_future(thread.run(go_on.wait, 5))
    second = asyncio.ensure_future(thread.run(ran.append, 1))
    await settle()
    second.cancel()
    await settle()
    go_on.set()
    await first
    await thread.run(int)
    assert ran == []


async def test_the_thread_goes_on_after_an_error_and_ends_with_its_owner() -> None:
    thread = WorkThread("t")
    with pytest.raises(ZeroDivisionError):
        await thread.run(divmod, 1, 0)
    assert await thread.run(divmod, 7, 2) == (3, 1)
    found = await thread.run(threading.current_thread)
    assert found.daemon
    del thread
    gc.collect()
    await asyncio.to_thread(found.join, 5)
    assert not found.is_alive()


# ── what is made ahead ────────────────────────────────────────────────────────────────────────


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


@pytest.mark.parametrize("items", [0, 1, 2, 5])
def test_everything_is_made_once_and_in_order(items: int, thread: ThreadPoolExecutor) -> None:
    made: list[int] = []

    def make(item: int) -> int:
        made.append(item)
        return -item

    assert list(ahead(thread, make, range(items))) == [-item for item in range(items)]
    assert made == list(range(items))


def test_the_next_one_is_made_while_the_caller_uses_one(thread: ThreadPoolExecutor) -> None:
    begun = [threading.Event() for _ in range(4)]

    def make(item: int) -> int:
        begun[item].set()
        return item

    for item in ahead(thread, make, range(4)):
        assert all(one.wait(60) for one in begun[item : item + 2])
        assert not any(one.is_set() for one in begun[item + 2 :])


def test_an_error_is_raised_where_its_result_would_be(thread: ThreadPoolExecutor) -> None:
    coming = ahead(thread, lambda item: 1 // item, [1, 0])
    assert next(coming) == 1
    with pytest.raises(ZeroDivisionError):
        next(coming)


def test_after_its_end_nothing_is_being_made(thread: ThreadPoolExecutor) -> None:
    made: list[int] = []
    with closing(ahead(thread, made.append, range(9))) as coming:
        next(coming)
    assert made == [0, 1]
    assert thread.submit(list, made).result() == [0, 1]
