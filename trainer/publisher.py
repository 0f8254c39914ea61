"""The trainer's end of the weight sync: copies weights out, broadcasts them in packed chunks.

    snapshot ──► copies in wire dtype, an event ──► send waits for it ──► chunk · chunk ──► engines

On a GPU a snapshot's copies may still be queued when ``snapshot`` returns (without digests, which
wait for them), and ``send`` runs on another thread and other streams: without the event it would
read memory that does not hold the new weights yet.
The transport is passed in (``rollouter.transports``), so that this package needs no vllm.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Protocol

import torch

from async_opd.weight_sync.digests import Digests
from async_opd.weight_sync.layout import Rendezvous, WeightMeta


class Transport(Protocol):
    """A group in which this process is rank 0 and the engines' workers are the others."""

    def open(self, world_size: int) -> Rendezvous:
        """Opens the rendezvous."""
        ...

    def connect(self) -> None:
        """Waits for the members; raises if one does not authenticate in time."""

    def close(self) -> None:
        """Leaves the group and closes its rendezvous."""

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> float:
        """Sends all tensors, in order; returns the seconds in the collective library."""
        ...


class Publisher:
    """Owns the snapshot, and one transfer group per sync group of replicas.

    ``source`` yields copies of the current weights under their checkpoint names, ``transport``
    makes a group.
    """

    def __init__(
        self,
        source: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        transport: Callable[[], Transport],
        digests: bool = False,
        in_host_memory: bool = False,
    ) -> None:
        """With ``digests`` the metadata of a snapshot holds those of its tensors.

        ``in_host_memory``: a snapshot leaves the GPU, which others use while it is sent.
        """
        self._source = source
        self._new_transport = transport
        self._transports: dict[int, Transport] = {}
        self._snapshot: list[tuple[str, torch.Tensor]] = []
        self._copied: torch.cuda.Event | None = None
        self._with_digests = digests
        self._in_host_memory = in_host_memory
        self._digests: tuple[str, ...] = ()

    def open(self, group: int, world_size: int, connected: Collection[int] = ()) -> Rendezvous:
        """A new group for a sync group; see Transport.open. Closes all but the ``connected``."""
        for number in self._transports.keys() - set(connected):
            self._transports.pop(number).close()
        self._transports[group] = self._new_transport()
        return self._transports[group].open(world_size)

    def connect(self, group: int) -> None:
        """See Transport.connect."""
        self._transports[group].connect()

    def snapshot(self) -> WeightMeta:
        """Copies the weights; the learner may go on changing its own afterwards."""
        self._snapshot, self._digests = [], ()
        digests = Digests(torch)
        source = self._source()
        source = digests.add_all(source) if self._with_digests else source
        if self._in_host_memory:
            source = ((name, tensor.cpu()) for name, tensor in source)
        self._snapshot = list(source)
        self._digests = tuple(digests.values().values())
        self._copied = _event_behind_all_work()
        return self.meta

    @property
    def meta(self) -> WeightMeta:
        """What the snapshot holds."""
        return WeightMeta(
            names=tuple(name for name, _ in self._snapshot),
            dtype_names=tuple(str(tensor.dtype).split(".")[-1] for _, tensor in self._snapshot),
            shapes=tuple(tuple(tensor.shape) for _, tensor in self._snapshot),
            itemsizes=tuple(tensor.dtype.itemsize for _, tensor in self._snapshot),
            digests=self._digests,
        )

    def send(self, group: int) -> float:
        """Broadcasts the snapshot to a sync group, once all its copies are made.

        Returns the seconds in the collective library.
        """
        if self._copied is not None:
            self._copied.synchronize()
        return self._transports[group].broadcast(self._snapshot, self.meta)


def _event_behind_all_work() -> torch.cuda.Event | None:
    """An event behind all that this thread has queued on its stream; None without a GPU."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return None
    event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
