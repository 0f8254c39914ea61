"""The trainer's end of the weight sync: copies weights out, broadcasts them in packed chunks.

    snapshot ──► host or device copy in wire dtype ──► send ──► chunk · chunk · chunk ──► engines

The transport is gloo here; for NCCL the cluster passes in vLLM's own communicator, so that this
package needs no vllm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

import torch

from async_opd.weight_sync.gloo_group import GlooGroup, GroupMember, gloo_group
from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan
from async_opd.weight_sync.rendezvous import RendezvousServer, new_secret

NamedWeights = Iterable[tuple[str, torch.Tensor]]


class Transport(Protocol):
    """A group in which this process is rank 0 and the engines' workers are the others."""

    def open(self, world_size: int) -> Rendezvous:
        """Opens the meeting point."""
        ...

    def connect(self) -> None:
        """Waits for the others; raises when they do not come in time, or are not they."""

    def close(self) -> None:
        """Leaves the group; nobody can meet here any more."""

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> None:
        """Sends all tensors, in order."""


class GlooTransport:
    """Chunks of bytes over torch's gloo process group. Listens on ``host`` only."""

    def __init__(self, host: str, timeout_s: float, chunk_bytes: int) -> None:
        self._host = host
        self._timeout_s = timeout_s
        self._chunk_bytes = chunk_bytes
        self._secret = new_secret()
        self._world_size = 0
        self._server: RendezvousServer | None = None
        self._made: GlooGroup | None = None

    def open(self, world_size: int) -> Rendezvous:
        """Listens on a free port of this host."""
        self._world_size = world_size
        self._server = RendezvousServer(self._host, self._secret, world_size, self._timeout_s)
        return Rendezvous(
            host=self._host,
            port=self._server.port,
            world_size=world_size,
            timeout_s=self._timeout_s,
            chunk_bytes=self._chunk_bytes,
            secret=self._secret,
        )

    def connect(self) -> None:
        """Joins as rank 0. Afterwards nobody can come any more."""
        assert self._server is not None, "opened first"
        member = GroupMember(0, self._world_size, self._host, self._secret, self._timeout_s)
        try:
            self._made = gloo_group(torch, member, self._server)
        finally:
            self._server.close()

    def close(self) -> None:
        """See Transport.close."""
        self._made = None
        if self._server is not None:
            self._server.close()

    @property
    def _group(self) -> Any:
        """torch's group. AssertionError before ``connect``."""
        assert self._made is not None, "connected first"
        return self._made.group

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> None:
        """One broadcast per chunk; each chunk is packed just before it is sent."""
        for chunk in chunk_plan(meta.sizes, self._chunk_bytes):
            self._group.broadcast(_pack(weights, chunk), 0).wait()


def _pack(weights: list[tuple[str, torch.Tensor]], chunk: range) -> torch.Tensor:
    pieces = [weights[index][1].contiguous().view(-1).view(torch.uint8) for index in chunk]
    return torch.cat(pieces).cpu()


class Publisher:
    """Owns the snapshot, and one group per wave of replicas.

    ``source`` yields copies of the current weights under their checkpoint names, ``transport``
    makes a group.
    """

    def __init__(
        self,
        source: Callable[[], Iterator[tuple[str, torch.Tensor]]],
        transport: Callable[[], Transport],
    ) -> None:
        self._source = source
        self._new_transport = transport
        self._transports: dict[int, Transport] = {}
        self._snapshot: list[tuple[str, torch.Tensor]] = []

    def open(self, group: int, world_size: int) -> Rendezvous:
        """A new group for a wave of replicas, in place of the one it had; see Transport.open."""
        if group in self._transports:
            self._transports.pop(group).close()
        self._transports[group] = self._new_transport()
        return self._transports[group].open(world_size)

    def connect(self, group: int) -> None:
        """See Transport.connect."""
        self._transports[group].connect()

    def snapshot(self) -> WeightMeta:
        """Copies the weights; the learner may go on changing its own afterwards."""
        self._snapshot = []
        self._snapshot = list(self._source())
        return self.meta

    @property
    def meta(self) -> WeightMeta:
        """What the snapshot holds."""
        return WeightMeta(
            names=tuple(name for name, _ in self._snapshot),
            dtype_names=tuple(str(tensor.dtype).split(".")[-1] for _, tensor in self._snapshot),
            shapes=tuple(tuple(tensor.shape) for _, tensor in self._snapshot),
            itemsizes=tuple(tensor.dtype.itemsize for _, tensor in self._snapshot),
        )

    def send(self, group: int) -> None:
        """Broadcasts the snapshot to a wave."""
        self._transports[group].broadcast(self._snapshot, self.meta)
