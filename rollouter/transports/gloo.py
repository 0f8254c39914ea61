"""Chunks of bytes over torch's gloo process group: the transport where there are no GPUs.

Only members that authenticate with the group's secret join (``async_opd.weight_sync.rendezvous``).
"""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from async_opd.weight_sync.layout import Rendezvous
from async_opd.weight_sync.rendezvous import (
    GlooGroup,
    RendezvousClient,
    RendezvousServer,
    gloo_group,
    new_secret,
)
from rollouter.transports import chunks

if TYPE_CHECKING:
    import torch

DEVICES = ("cpu", "cuda")


class GlooSender(chunks.Sender):
    """Listens on ``host`` only."""

    _server: RendezvousServer | None = None
    _made: GlooGroup | None = None

    def listen(self) -> tuple[str, int, bytes]:
        """Listens on a free port of this host."""
        secret = new_secret()
        args = (self.host, secret, self.world_size, self.timeout_s)
        self._server = RendezvousServer(*args, ports=self.ports)
        return self.host, self._server.port, secret

    def connect(self) -> None:
        """Joins as rank 0, and closes the rendezvous."""
        import torch

        assert self._server is not None, "opened first"
        sizes = (self.world_size, self.timeout_s, self.chunk_bytes)
        at = Rendezvous(self.host, self._server.port, *sizes, self.secret)
        try:
            self._made = gloo_group(torch, at, 0, self.host, self._server)
        finally:
            self._server.close()

    def close(self) -> None:
        """See Sender.close."""
        self._made = None
        if self._server is not None:
            self._server.close()

    def send(self, chunk: torch.Tensor, timeout_s: float) -> None:
        """One broadcast. AssertionError before ``connect``."""
        assert self._made is not None, "connected first"
        self._made.group.broadcast(chunk.cpu(), 0).wait(timedelta(seconds=timeout_s))


class GlooReceiver(chunks.Receiver):
    """WeightSyncError or RuntimeError if the group is not made."""

    _made: GlooGroup | None = None

    def __init__(self, at: Rendezvous, rank: int) -> None:
        import torch

        client = RendezvousClient(at.host, at.port, at.secret, at.timeout_s)
        try:
            self._made = gloo_group(torch, at, rank, client.address, client)
        finally:
            client.close()

    def receive(self, nbytes: int, timeout_s: float) -> torch.Tensor:
        """See Receiver.receive. AssertionError after ``close``."""
        import torch

        assert self._made is not None, "not closed yet"
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        self._made.group.broadcast(buffer, 0).wait(timedelta(seconds=timeout_s))
        return buffer

    def close(self) -> None:
        """See Receiver.close."""
        self._made = None


sender, receiver = GlooSender, GlooReceiver
