"""Stores of payloads in this process: nodes that can be lost, and a teacher that stores on them."""

from __future__ import annotations

import asyncio
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray

from async_opd.cluster.payloads.stores import NodePayloads, Payload
from async_opd.cluster.payloads.storing import StoringReplica
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import ProcessDied
from async_opd.core.samples import Rollout, Sample
from async_opd.core.scores import SampledLogprobs
from async_opd.core.stages import SCORED, rollouts_topic
from async_opd.queue.message_queue import MessageQueue
from tests.conftest import make_rollout
from tests.world.clock import settle

EXPIRY_S = 60.0


class Copy:
    """Stands for an object of Ray, which exists as long as its reference."""

    def __init__(self, payload: Payload) -> None:
        self.payload = payload.copy()


class Nodes:
    """Implements ``async_opd.queue.payloads.PayloadStores``."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.clock = clock
        self.nodes: dict[str, Node] = {}
        self.closed = False
        self.on_disk: dict[str, int] = {}

    def spilled(self) -> dict[str, int]:
        return self.on_disk

    async def open(self, node: str) -> Node:
        if node not in self.nodes or self.nodes[node].lost:
            self.nodes[node] = Node(self.clock)
        return self.nodes[node]

    def close(self) -> None:
        self.closed = True
        for node in self.nodes.values():
            node.lost = True


class Node:
    """Implements ``async_opd.core.batch.PayloadStore``, until it is ``lost``."""

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        self.copies: weakref.WeakSet[Copy] = weakref.WeakSet()
        """Payloads that exist."""
        self.lost = False
        self._payloads = NodePayloads(EXPIRY_S, clock, self._copy)
        self._told: set[asyncio.Task[None]] = set()

    def _copy(self, payload: Payload) -> Copy:
        copy = Copy(payload)
        self.copies.add(copy)
        return copy

    async def put(self, payloads: Sequence[Payload]) -> list[int]:
        if self.lost:
            raise ProcessDied("payloads", "its node is lost")
        return await self._payloads.put(payloads)

    async def fetch(self, numbers: Sequence[int]) -> list[Payload | None]:
        if self.lost:
            return [None] * len(numbers)
        found = await self._payloads.references(numbers)
        return [one[0].payload if one else None for one in found]

    def settle(self, claimed: Sequence[int], dropped: Sequence[int]) -> None:
        self._told.add(asyncio.create_task(self._payloads.settle(claimed, dropped)))


class StoreProcess:
    """Stands for ``Remote`` of a store's process: it is built once ``built`` is set.

    ``lost`` are the numbers of payloads whose references raise, ``late`` those which come after all
    others; ``most`` were on their way at once. ``on_disk`` is what Ray reports.
    """

    def __init__(self, built: bool = True) -> None:
        self.built = asyncio.Event()
        if built:
            self.built.set()
        self.lost: set[int] = set()
        self.late: dict[int, asyncio.Event] = {}
        self.most = self.coming = 0
        self.on_disk = 0
        self.killed = False

    def kill(self) -> None:
        self.killed = True

    async def build(self, path: str, args: tuple[Any, ...], timeout_s: float) -> None:
        await self.built.wait()

    async def is_built(self, timeout_s: float) -> bool:
        await self.built.wait()
        return True

    async def call(self, method: str, *args: Any) -> Any:
        if method == "spilled":
            return self.on_disk
        return [[self._payload(number)] for number in args[0]]

    async def _payload(self, number: int) -> Payload:
        self.coming += 1
        self.most = max(self.most, self.coming)
        try:
            await self.late[number].wait() if number in self.late else await settle(1)
        finally:
            self.coming -= 1
        if number in self.lost:
            raise ray.exceptions.ObjectLostError("", None, "")
        return np.array([number], np.uint8)


class Teacher:
    """Scores at once; ``scored`` counts each rollout."""

    def __init__(self) -> None:
        self.scored: Counter[str] = Counter()

    async def score(self, batch: Batch) -> Batch:
        rollouts = unpack(Rollout, [batch])
        self.scored.update(rollout.uid for rollout in rollouts)
        return Batch.pack(
            Sample(one.without_teacher_inputs, SampledLogprobs(one.rollout_logprobs))
            for one in rollouts
        )


class StoringTeacher:
    """A teacher on a node whose samples stay there; it opens the node's store when it scores."""

    def __init__(self, teacher: Any, queue: Any, node: str) -> None:
        self._teacher, self._queue, self._node = teacher, queue, node
        self._storing: StoringReplica | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._teacher, name)

    async def score(self, batch: Batch) -> Batch:
        if self._storing is None:
            self._storing = await storing_teacher(self._queue, self._node, self._teacher)
        return await self._storing.score(batch)


async def storing_teacher(
    queue: MessageQueue, node: str, teacher: Any = None, least: int = 0
) -> StoringReplica:
    """A teacher on a node, whose samples of ``least`` bytes and more stay there."""
    store = await queue.payload_store(node)
    return StoringReplica(teacher or Teacher(), queue, node, store, "teacher t/0", least)


async def put_scored(queue: MessageQueue, *uids: str, node: str = "a") -> Batch:
    """Samples of these uids, stored on a node and put into the queue."""
    teacher = await storing_teacher(queue, node)
    batch = await teacher.score(Batch.pack(make_rollout(uid) for uid in uids))
    await queue.put(SCORED, batch)
    return batch


async def score_again(queue: MessageQueue, node: str) -> list[str]:
    """Scores all rollouts that wait for teacher ``t``, on a node; returns their uids."""
    lease = await queue.get(rollouts_topic("t"), 64)
    teacher = await storing_teacher(queue, node)
    await queue.put(SCORED, await teacher.score(Batch.join(lease.batches)))
    await queue.ack(rollouts_topic("t"), lease.id)
    return [header.uid for batch in lease.batches for header in batch.headers]
