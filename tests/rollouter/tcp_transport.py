"""A weight transport in one file, over plain TCP: what CONTRIBUTING.md walks through.

No table names it: the tests register it, and send weights through it to real engines.
"""

from __future__ import annotations

import hmac
import secrets
import socket
from typing import TYPE_CHECKING

from async_opd.weight_sync.layout import Rendezvous
from async_opd.weight_sync.rendezvous import NONCE_BYTES, TAG_BYTES, hmac_tag, new_secret
from rollouter.transports import chunks

if TYPE_CHECKING:
    import torch

DEVICES = ("cpu", "cuda")


class TcpSender(chunks.Sender):
    """The trainer's end: a connection to each receiver that authenticates itself."""

    def listen(self) -> tuple[str, int, bytes]:
        """Listens on a free port."""
        self.members: list[socket.socket] = []
        self.server = socket.create_server((self.host, 0))
        self.server.settimeout(self.timeout_s)
        return self.host, self.server.getsockname()[1], new_secret()

    def connect(self) -> None:
        """TimeoutError when a receiver does not connect."""
        while len(self.members) < self.world_size - 1:
            member, _ = self.server.accept()
            member.settimeout(self.timeout_s)
            nonce = secrets.token_bytes(NONCE_BYTES)
            member.sendall(nonce)
            shown = member.recv(TAG_BYTES, socket.MSG_WAITALL)
            if hmac.compare_digest(shown, hmac_tag(self.secret, "member", nonce)):
                self.members.append(member)

    def send(self, chunk: torch.Tensor, timeout_s: float) -> None:
        """The same bytes to one after the other. TimeoutError when one does not read on."""
        for member in self.members:
            member.settimeout(timeout_s)
            member.sendall(chunk.cpu().numpy().data)

    def close(self) -> None:
        """Closes all sockets."""
        for open_socket in (self.server, *self.members):
            open_socket.close()


class TcpReceiver(chunks.Receiver):
    """An engine's end, one in each of its workers."""

    def __init__(self, at: Rendezvous, rank: int) -> None:
        self.connection = socket.create_connection((at.host, at.port), at.timeout_s)
        nonce = self.connection.recv(NONCE_BYTES, socket.MSG_WAITALL)
        self.connection.sendall(hmac_tag(at.secret, "member", nonce))

    def receive(self, nbytes: int, timeout_s: float) -> torch.Tensor:
        """ConnectionError when the sender closes the connection, TimeoutError when it is late."""
        import torch

        self.connection.settimeout(timeout_s)
        chunk = torch.empty(nbytes, dtype=torch.uint8)
        room = memoryview(chunk.numpy())
        while room:
            got = self.connection.recv_into(room)
            if not got:
                raise ConnectionError("the trainer closed the connection")
            room = room[got:]
        return chunk

    def close(self) -> None:
        """Closes the connection."""
        self.connection.close()


sender, receiver = TcpSender, TcpReceiver
