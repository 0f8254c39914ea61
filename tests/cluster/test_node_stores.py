"""The stores of the nodes: one that fails or hangs leaves the others as they are."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from async_opd.cluster.payloads.stores import FETCHES, NodeStore, NodeStores
from async_opd.cluster.remote import Remote
from tests.world.clock import settle
from tests.world.payloads import StoreProcess


def stores(patch: pytest.MonkeyPatch, processes: Mapping[str, StoreProcess]) -> NodeStores:
    """Those of nodes with these processes."""
    patch.setattr(Remote, "create", lambda name, bundle, **more: processes[bundle.node_id])
    return NodeStores("run", {}, 60.0, 60.0, 60.0)


async def test_a_node_that_hangs_does_not_delay_the_store_of_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = stores(monkeypatch, {"a" * 56: StoreProcess(built=False), "b" * 56: StoreProcess()})
    hangs = asyncio.create_task(made.open("a" * 56))
    await settle()
    async with asyncio.timeout(5):
        store = await made.open("b" * 56)
        assert await made.open("b" * 56) is store
    assert not hangs.done()
    hangs.cancel()


async def test_a_process_whose_start_is_given_up_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    made = stores(monkeypatch, {"a" * 56: (process := StoreProcess(built=False))})
    starting = asyncio.create_task(made.open("a" * 56))
    await settle()
    starting.cancel()
    await asyncio.wait({starting})
    assert process.killed


async def test_two_that_ask_for_the_store_of_a_node_get_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = stores(monkeypatch, {"a" * 56: (process := StoreProcess(built=False))})
    asking = [asyncio.create_task(made.open("a" * 56)) for _ in range(2)]
    await settle()
    process.built.set()
    first, second = [await one for one in asking]
    assert first is second


async def test_a_payload_that_is_lost_leaves_those_behind_it() -> None:
    process = StoreProcess()
    process.lost = {2}
    found = await NodeStore(process, "x", 60.0).fetch([1, 2, 3])  # type: ignore[arg-type]
    assert [None if one is None else one.tolist() for one in found] == [[1], None, [3]]


def fetching(process: StoreProcess, numbers: range, timeout_s: float = 60.0) -> asyncio.Task[Any]:
    remote: Any = process
    return asyncio.create_task(NodeStore(remote, "x", timeout_s).fetch(numbers))  # type: ignore[arg-type]


async def test_payloads_come_at_the_same_time_up_to_a_bound_and_in_their_order() -> None:
    process = StoreProcess()
    process.late = {0: asyncio.Event()}
    found = fetching(process, range(3 * FETCHES))
    await settle(100)
    assert (process.most, process.coming) == (FETCHES, 1)  # all others are there
    process.late[0].set()
    assert [one.tolist() for one in await found] == [[index] for index in range(3 * FETCHES)]


async def test_a_payload_that_is_too_late_is_lost_alone() -> None:
    process = StoreProcess()
    process.late = {1: asyncio.Event()}
    found = await asyncio.wait_for(fetching(process, range(3), timeout_s=0.5), 5)
    assert [None if one is None else one.tolist() for one in found] == [[0], None, [2]]


async def test_bytes_that_a_node_wrote_to_its_disk_before_are_not_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = stores(monkeypatch, {"a" * 56: (process := StoreProcess())})
    process.on_disk = 5
    await made.open("a" * 56)
    process.on_disk = 7
    found = []
    for _ in range(2):
        found.append(made.spilled())
        await settle()
    assert found == [{"a" * 8: 0}, {"a" * 8: 2}]
