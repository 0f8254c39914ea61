"""The rendezvous of a transfer group: a connection that does not know the secret reads nothing.

    sender: RendezvousServer ◄──TCP── RendezvousClient: a member     each authenticates itself to
       addresses by key  ──set, get──►                               the other, then the member
                                                                     writes and reads addresses

Torch's own store lets every process that finds its port read and change the addresses. This server
listens on one address only, answers no connection that has not authenticated itself with the secret
(which the members get over Ray), and is closed as soon as the group is made. The secret itself is
never sent. The connections are neither encrypted nor signed.

Members of a gloo group authenticate themselves to one another, too:

    rendezvous ──addresses──► gloo connects all to all ──► all exchange HMAC tags ──► group

gloo accepts every connection that names the right number, which can be guessed. So after the group
is made, every pair of members exchanges tags that only a holder of the secret can compute, over the
very connections that weights will take. This package imports no torch: callers pass it.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from async_opd.core.errors import WeightSyncError
from async_opd.processes.listening import listening_socket
from async_opd.weight_sync.layout import Rendezvous

NONCE_BYTES = TAG_BYTES = 32
HANDSHAKE_S = 10.0
"""Seconds after which a connection that has not authenticated itself is closed."""
LINE_BYTES = 1 << 16
MAX_UNAUTHENTICATED = 64
"""Connections that have not authenticated themselves yet, beside one for each member: each has a
thread, and any process could open any number. A further one replaces the oldest of them."""
CLOSED = "the rendezvous was closed before all members had connected"
WELCOME = b"\x01"
"""The server's answer to a member that has authenticated itself."""
RETRY_S = 0.05
"""Seconds after which a member whose connection was closed connects again."""


def new_secret() -> bytes:
    """A new secret of 32 random bytes: each group has its own."""
    return secrets.token_bytes(32)


def hmac_tag(secret: bytes, role: str, *seen: bytes) -> bytes:
    """HMAC-SHA256 of the role and of what was seen: only a holder of the secret can compute it."""
    return hmac.digest(secret, b"\0".join((role.encode(), *seen)), "sha256")


class RendezvousServer:
    """The sender's addresses, and the socket on which members reach them, opened at once."""

    def __init__(
        self, host: str, secret: bytes, members: int, timeout_s: float, ports: range | None = None
    ) -> None:
        """Raises what ``listening_socket`` raises."""
        self.refused = 0
        self._secret = secret
        self._timeout_s = timeout_s
        self._addresses: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._closed = False
        self._max_unauthenticated = members + MAX_UNAUTHENTICATED
        self._unauthenticated: dict[socket.socket, None] = {}  # oldest first
        self._members: set[socket.socket] = set()
        self._listener = listening_socket(host, ports)
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._receive, name="rendezvous", daemon=True).start()

    def set(self, key: str, value: bytes) -> None:
        """Writes the address of ``key``."""
        with self._changed:
            self._addresses[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> bytes:
        """Waits for the address of ``key``. WeightSyncError after ``timeout_s``."""
        with self._changed:
            if self._changed.wait_for(lambda: key in self._addresses or self._closed, timeout_s):
                if key in self._addresses:
                    return self._addresses[key]
                raise WeightSyncError("weight sync", CLOSED)
        refused = f", and {self.refused} connections did not authenticate" if self.refused else ""
        raise WeightSyncError(
            "weight sync",
            f"a member did not connect within {timeout_s:g} s (no {key!r}){refused}",
            "raise sync.timeout_s if the engines are busy; otherwise a replica hangs",
        )

    def close(self) -> None:
        """Closes the socket and all connections. Safe to call again."""
        with self._changed:
            self._closed = True
            connections = [*self._unauthenticated, *self._members]
            self._changed.notify_all()
        for connection in (self._listener, *connections):
            _shut_down(connection)
        self._listener.close()

    def _receive(self) -> None:
        while not self._closed:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if not self._closed:
                    time.sleep(0.1)  # no file descriptor left for another connection
                continue
            self._accept(connection)

    def _accept(self, connection: socket.socket) -> None:
        """Serves a connection in a thread, in place of the oldest unauthenticated one if full."""
        with self._changed:
            if self._closed:
                connection.close()
                return
            if len(self._unauthenticated) >= self._max_unauthenticated:
                oldest = next(iter(self._unauthenticated))
                del self._unauthenticated[oldest]
                _shut_down(oldest)
            self._unauthenticated[connection] = None
        threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        try:
            with connection, suppress(OSError, ValueError, TypeError, WeightSyncError):
                if not self._authenticates(connection):
                    self.refused += 1
                    return
                with self._changed:
                    if connection not in self._unauthenticated or self._closed:
                        return  # it was dropped meanwhile; a member connects again
                    del self._unauthenticated[connection]
                    self._members.add(connection)
                connection.sendall(WELCOME)
                connection.settimeout(self._timeout_s)
                with connection.makefile("rwb") as stream:
                    while line := stream.readline(LINE_BYTES):
                        answer = self._answer(json.loads(line))
                        stream.write(json.dumps(answer).encode() + b"\n")
                        stream.flush()
        finally:
            with self._changed:
                self._unauthenticated.pop(connection, None)
                self._members.discard(connection)

    def _authenticates(self, connection: socket.socket) -> bool:
        """Authenticates the sender to the connection, and returns whether that is a member's."""
        deadline = time.monotonic() + HANDSHAKE_S
        try:
            theirs = _receive_exactly(connection, NONCE_BYTES, deadline)
            ours = secrets.token_bytes(NONCE_BYTES)
            connection.sendall(ours + hmac_tag(self._secret, "sender", theirs, ours))
            shown = _receive_exactly(connection, TAG_BYTES, deadline)
        except OSError:
            return False
        return hmac.compare_digest(shown, hmac_tag(self._secret, "member", ours, theirs))

    def _answer(self, request: Mapping[str, Any]) -> str:
        if "value" in request:
            self.set(str(request["key"]), bytes.fromhex(request["value"]))
            return ""
        return self.get(str(request["key"]), self._timeout_s).hex()


class RendezvousClient:
    """A member's connection to the server. ``address`` is this machine's end of it."""

    def __init__(self, host: str, port: int, secret: bytes, timeout_s: float) -> None:
        """WeightSyncError if no sender that knows the secret answers within ``timeout_s``.

        Connects again until then if its connection is closed: with too many unauthenticated
        connections the server closes the oldest one, which may be this one.
        """
        self._secret = secret
        try:
            self._connection = self._connect(host, port, timeout_s)
        except OSError as error:
            cause = f"no rendezvous of this group at {host}:{port}: {error or type(error).__name__}"
            raise WeightSyncError(
                "weight sync", cause, "the sender is gone, or not ours"
            ) from error
        self._connection.settimeout(timeout_s)
        self._stream = self._connection.makefile("rwb")
        self.address = str(self._connection.getsockname()[0])

    def set(self, key: str, value: bytes) -> None:
        """See RendezvousServer.set."""
        self._ask({"key": key, "value": value.hex()})

    def get(self, key: str, timeout_s: float) -> bytes:
        """See RendezvousServer.get; bounded by the timeout of the connection."""
        return bytes.fromhex(self._ask({"key": key}))

    def close(self) -> None:
        """Closes the connection."""
        self._stream.close()
        self._connection.close()

    def _connect(self, host: str, port: int, timeout_s: float) -> socket.socket:
        """OSError if no server listens, another one does, or it closes every connection."""
        deadline, tries = time.monotonic() + timeout_s, 0
        while (left := deadline - time.monotonic()) > 0:
            try:
                connection = socket.create_connection((host, port), left)
            except TimeoutError:
                if tries:  # the closed connections are the cause
                    break
                raise
            try:
                self._handshake(connection, deadline)
                return connection
            except TimeoutError:
                connection.close()
                if tries:
                    break
                raise
            except (ConnectionResetError, BrokenPipeError):
                connection.close()
                tries += 1
                time.sleep(RETRY_S)
            except BaseException:
                connection.close()
                raise
        raise TimeoutError(
            f"it closed {tries} connections within {timeout_s:g} s: "
            "too many unauthenticated ones may be open"
        )

    def _handshake(self, connection: socket.socket, deadline: float) -> None:
        """ConnectionError if the other side is not the sender, or closes the connection."""
        ours = secrets.token_bytes(NONCE_BYTES)
        connection.sendall(ours)
        theirs = _receive_exactly(connection, NONCE_BYTES, deadline)
        shown = _receive_exactly(connection, TAG_BYTES, deadline)
        if not hmac.compare_digest(shown, hmac_tag(self._secret, "sender", ours, theirs)):
            raise ConnectionRefusedError("the server there does not know the secret")
        connection.sendall(hmac_tag(self._secret, "member", theirs, ours))
        _receive_exactly(connection, len(WELCOME), deadline)

    def _ask(self, request: dict[str, str]) -> str:
        try:
            self._stream.write(json.dumps(request).encode() + b"\n")
            self._stream.flush()
            line = self._stream.readline(LINE_BYTES)
        except OSError as error:
            cause = f"the rendezvous does not answer: {error or type(error).__name__}"
            raise WeightSyncError("weight sync", cause) from error
        if not line.endswith(b"\n"):
            raise WeightSyncError("weight sync", CLOSED)
        return str(json.loads(line))


def tags_sent(secret: bytes, rank: int, ranks: Iterable[int]) -> bytes:
    """The tags that a member sends to each of the ranks over the group's own connections."""
    return b"".join(hmac_tag(secret, f"rank {rank} to {other}") for other in ranks)


def tags_expected(secret: bytes, rank: int, ranks: Iterable[int]) -> bytes:
    """The tags that the member expects from each of them."""
    return b"".join(hmac_tag(secret, f"rank {other} to {rank}") for other in ranks)


def _shut_down(connection: socket.socket) -> None:
    """Wakes the thread that reads from the connection; that thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


def _receive_exactly(connection: socket.socket, count: int, deadline: float) -> bytes:
    """Exactly ``count`` bytes. OSError if the connection ends before."""
    found = b""
    while len(found) < count:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"only {len(found)} of {count} bytes came in time")
        connection.settimeout(left)
        more = connection.recv(count - len(found))
        if not more:
            raise ConnectionResetError("the other side closed the connection")
        found += more
    return found


Addresses = RendezvousServer | RendezvousClient


@dataclass(frozen=True)
class GlooGroup:
    """``group`` is torch's; it may still use the store as long as it lives."""

    group: Any
    store: Any


def gloo_group(
    torch: Any, at: Rendezvous, rank: int, address: str, addresses: Addresses
) -> GlooGroup:
    """Connects all members. WeightSyncError or RuntimeError if one is absent or has another secret.

    This one is ``rank``; its gloo listens on its own ``address`` only.
    """
    dist = torch.distributed
    store = _store(dist, addresses, at.timeout_s)
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=at.timeout_s)
    options._devices = [dist.ProcessGroupGloo.create_device(hostname=address)]
    made = GlooGroup(dist.ProcessGroupGloo(store, rank, at.world_size, options), store)
    if not all_know_secret(torch, made.group, rank, at.world_size, at.secret):
        raise WeightSyncError(
            "weight sync",
            f"a rank of the group of {at.world_size} does not know its secret",
            "another process on this network or machine connected in a member's place",
        )
    return made


def all_know_secret(
    torch: Any, group: Any, rank: int, size: int, secret: bytes, device: str = "cpu"
) -> bool:
    """Whether every other rank sent the tag of a member. A collective."""
    ranks = range(size)
    data = bytearray(tags_sent(secret, rank, ranks))
    sent_tags = torch.frombuffer(data, dtype=torch.uint8).to(device)
    received_tags = torch.empty_like(sent_tags)
    group.alltoall_base(received_tags, sent_tags, [], []).wait()
    received = received_tags.cpu().numpy().tobytes()
    return hmac.compare_digest(received, tags_expected(secret, rank, ranks))


def _store(dist: Any, addresses: Addresses, timeout_s: float) -> Any:
    """The store through which torch reads and writes addresses."""

    class Store(dist.Store):  # type: ignore[misc]
        def set(self, key: str, value: bytes) -> None:
            addresses.set(key, bytes(value))

        def get(self, key: str) -> bytes:
            return addresses.get(key, timeout_s)

        def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
            for key in keys:
                addresses.get(key, timeout.total_seconds() if timeout else timeout_s)

    return Store()
