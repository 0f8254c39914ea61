"""A teacher's replica that hands its large samples over to the store of its node."""

from __future__ import annotations

from typing import Any

import ray

from async_opd.cluster.actor_shell import imported
from async_opd.core.batch import MESSAGE_BYTES, Batch, PayloadStore, Stored
from async_opd.core.errors import StageError
from async_opd.core.stages import Queue
from async_opd.waiting.deadline import offload
from teachers.answers import check


class StoringReplica:
    """A teacher's replica whose large samples stay on its node."""

    def __init__(
        self, replica: Any, queue: Queue, node: str, store: PayloadStore, name: str, least: int
    ) -> None:
        """``name`` is the replica's. Samples of ``least`` bytes and more are stored.

        All are if those by value, and the rollouts of the others, exceed a message together.
        """
        self._replica, self._queue, self._node = replica, queue, node
        self._store, self._name, self._least = store, name, least

    def __getattr__(self, name: str) -> Any:
        return getattr(self._replica, name)

    async def score(self, rollouts: Batch) -> Batch:
        """The samples, in the same order, checked here: the scorer does not read them."""
        samples: Batch = await self._replica.score(rollouts)
        stays = self._stays(rollouts, samples)
        if not any(stays):
            return samples
        await offload(samples.nbytes, check, self._name, rollouts, samples)
        payloads = [one.buffer for one, stored in zip(samples.each, stays, strict=True) if stored]
        store = self._store
        try:
            numbers = await store.put(payloads)
        except StageError:  # it has died, or its queue has
            self._store = store = await self._queue.payload_store(self._node)
            numbers = await store.put(payloads)
        left = iter(numbers)
        return Batch.of_stored(
            rollouts,
            samples,
            [
                Stored(store, next(left), rollout.nbytes) if stored else None
                for rollout, stored in zip(rollouts.each, stays, strict=True)
            ],
        )

    def _stays(self, rollouts: Batch, samples: Batch) -> list[bool]:
        """Whether each sample is stored: large ones, or all if the answer exceeds a message."""
        large = [one.nbytes >= self._least for one in samples.each]
        # other samples than those of the rollouts are refused later
        pairs = zip(rollouts.each, samples.each, large, strict=False)
        answer = sum((rollout if stored else one).nbytes for rollout, one, stored in pairs)
        return [stored or answer > MESSAGE_BYTES for stored in large]


async def storing(
    path: str, args: tuple[Any, ...], queue: Queue, name: str, least: int
) -> StoringReplica:
    """The replica of this ``name`` that ``path`` makes, over the store of its node."""
    module, _, made = path.partition(":")
    replica = getattr(imported(module), made)(*args)
    node = ray.get_runtime_context().get_node_id()
    return StoringReplica(replica, queue, node, await queue.payload_store(node), name, least)
