"""Payloads in Ray's object store: one process a node, which owns those that were made on it.

    StoringReplica ──put──► NodePayloads ──ray.put──► the node's object store
                                 ▲ fetch: references        │ from node to node
                       rank ─────┴──────────────────────────┘

An object of Ray dies with the process that put it. So a replica hands its payloads over to a
process that holds them and does nothing else: a replica's death loses none. These processes are
children of the queue's, and end with it: a queue that died has lost the samples anyway.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray._private.internal_api import node_stats
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_opd.cluster.remote import Remote
from async_opd.core.errors import StageError
from async_opd.waiting.deadline import Bound, gather_or_cancel, offload

Payload = NDArray[np.uint8]

CLAIM_S = 60.0
"""Least seconds in which a payload may be claimed, however short leases are."""
FETCHES = 8
"""Payloads that a rank fetches from one node at once: one that is late delays few others."""


@dataclass
class _Kept:
    reference: Any  # ray.ObjectRef
    since: float
    claimed: bool = False


class NodePayloads:
    """The payloads of one node, in the process that owns them."""

    def __init__(
        self,
        expiry_s: float,
        clock: Callable[[], float] = time.monotonic,
        keep: Callable[[Payload], Any] = ray.put,
    ) -> None:
        """One that is not claimed is dropped ``expiry_s`` after it came, with the next ``put``.

        ``keep`` copies a payload, and returns the reference that keeps it.
        """
        self._expiry_s, self._clock, self._keep = expiry_s, clock, keep
        self._kept: dict[int, _Kept] = {}

    async def put(self, payloads: Sequence[Payload]) -> list[int]:
        """See PayloadStore.put."""
        now = self._clock()
        for number, one in list(self._kept.items()):
            if not one.claimed and now - one.since > self._expiry_s:
                del self._kept[number]
        references = [await offload(payload.nbytes, self._keep, payload) for payload in payloads]
        numbers = [secrets.randbits(62) for _ in references]
        kept = (_Kept(reference, now) for reference in references)
        self._kept.update(zip(numbers, kept, strict=True))
        return numbers

    async def references(self, numbers: Sequence[int]) -> list[Any]:
        """Of each payload Ray's reference, in a list; an empty one for a payload it has not."""
        found = (self._kept.get(number) for number in numbers)
        return [[] if one is None else [one.reference] for one in found]

    async def settle(self, claimed: Sequence[int], dropped: Sequence[int]) -> None:
        """See PayloadStore.settle."""
        for number in claimed:
            if number in self._kept:
                self._kept[number].claimed = True
        for number in dropped:
            self._kept.pop(number, None)

    async def spilled(self) -> int:
        """Bytes that this node's object store has written to its disk since its start."""
        own = ray.get_runtime_context().get_node_id()
        (at,) = (node for node in await asyncio.to_thread(ray.nodes) if node["NodeID"] == own)
        address = (at["NodeManagerAddress"], at["NodeManagerPort"])
        found = await asyncio.to_thread(node_stats, *address, include_memory_info=False)
        return int(found.store_stats.spilled_bytes_total)


@dataclass(frozen=True)
class NodeStore:
    """``async_opd.core.batch.PayloadStore`` in the process ``remote``."""

    remote: Remote
    name: str
    timeout_s: float

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NodeStore) and other.name == self.name

    async def put(self, payloads: Sequence[Payload]) -> list[int]:
        """See PayloadStore.put. Raises what ``Remote.call`` raises."""
        return list(await self.remote.call("put", payloads))

    async def fetch(self, numbers: Sequence[int]) -> list[Payload | None]:
        """See PayloadStore.fetch. One that does not come within ``timeout_s`` is lost, too."""
        found: list[Payload | None] = [None] * len(numbers)
        at_once = asyncio.Semaphore(FETCHES)

        async def take(index: int, reference: Any) -> None:
            async with at_once:
                with suppress(ray.exceptions.RayError):
                    found[index] = await reference

        with suppress(StageError, TimeoutError):
            references = await self.remote.call("references", numbers)
            pairs = ((index, one) for index, ones in enumerate(references) for one in ones)
            async with Bound(self.timeout_s):
                await gather_or_cancel(*(take(*pair) for pair in pairs))
        return found

    def settle(self, claimed: Sequence[int], dropped: Sequence[int]) -> None:
        """See PayloadStore.settle."""
        self.remote.send("settle", claimed, dropped)


@dataclass
class NodeStores:
    """``async_opd.queue.payloads.PayloadStores``, in the queue's process."""

    run: str
    env: Mapping[str, str]
    expiry_s: float
    start_s: float
    timeout_s: float
    _open: dict[str, NodeStore] = field(default_factory=dict)
    _opening: defaultdict[str, asyncio.Lock] = field(
        default_factory=lambda: defaultdict(asyncio.Lock)
    )
    _spilled: dict[str, int] = field(default_factory=dict)
    _before: dict[str, int] = field(default_factory=dict)
    """Bytes that each node had written to its disk when its first store started."""
    _asking: asyncio.Task[None] | None = None

    async def open(self, node: str) -> NodeStore:
        """See Queue.payload_store."""
        async with self._opening[node]:  # another node may hang
            store = self._open.get(node)
            if store is not None:
                with suppress(StageError):
                    if await store.remote.is_built(self.timeout_s):
                        return store
            self._open[node] = store = await self._started(node)
            await self._ask(node, store)
            return store

    async def _started(self, node: str) -> NodeStore:
        expiry_s = max(self.expiry_s, CLAIM_S)
        name = f"payloads/{node[:8]}/{secrets.token_hex(4)}"
        remote = Remote.create(
            name,
            timeout_s=self.timeout_s,
            env=dict(self.env),
            bundle=NodeAffinitySchedulingStrategy(node, soft=False),
            actor=f"{self.run}/{name}",
            kind="PayloadStore",
        )
        try:
            await remote.build(f"{__name__}:NodePayloads", (expiry_s,), self.start_s)
        except BaseException:  # close() does not know of it yet
            remote.kill()
            raise
        return NodeStore(remote, name, self.timeout_s)

    def spilled(self) -> dict[str, int]:
        """See PayloadStores.spilled. Asks all stores for the next call."""
        if self._asking is None or self._asking.done():
            self._asking = asyncio.create_task(self._ask_all(), name="asking for spilled bytes")
        return dict(self._spilled)

    async def _ask_all(self) -> None:
        for node, store in list(self._open.items()):
            await self._ask(node, store)

    async def _ask(self, node: str, store: NodeStore) -> None:
        with suppress(StageError):
            now = await store.remote.call("spilled")
            self._spilled[node[:8]] = now - self._before.setdefault(node, now)

    def close(self) -> None:
        """See PayloadStores.close."""
        if self._asking is not None:
            self._asking.cancel()
        for store in self._open.values():
            store.remote.kill()
