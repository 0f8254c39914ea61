"""A rendezvous with many unauthenticated connections: members join all the same."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from async_opd.core.errors import WeightSyncError
from async_opd.weight_sync.rendezvous import (
    MAX_UNAUTHENTICATED,
    RendezvousClient,
    RendezvousServer,
    new_secret,
)

HERE = "127.0.0.1"
BOUND_S = 20.0
SECRET = new_secret()
MEMBERS = 2


@pytest.fixture
def rendezvous() -> Iterator[RendezvousServer]:
    made = RendezvousServer(HERE, SECRET, MEMBERS, BOUND_S)
    yield made
    made.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def silent(port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    """Connections that send nothing."""
    return [
        stack.enter_context(socket.create_connection((HERE, port), BOUND_S)) for _ in range(count)
    ]


@pytest.mark.slow
def test_a_member_joins_a_rendezvous_that_silent_connections_fill(
    rendezvous: RendezvousServer, stack: ExitStack
) -> None:
    silent(rendezvous.port, 2 * (MEMBERS + MAX_UNAUTHENTICATED), stack)
    member = RendezvousClient(HERE, rendezvous.port, SECRET, BOUND_S)
    member.set("k", b"an address")
    member.close()
    assert rendezvous.get("k", BOUND_S) == b"an address"


def test_the_oldest_unauthenticated_connection_is_closed_for_the_next_one(
    rendezvous: RendezvousServer, stack: ExitStack
) -> None:
    first = silent(rendezvous.port, 1, stack)[0]
    silent(rendezvous.port, MEMBERS + MAX_UNAUTHENTICATED, stack)
    first.settimeout(BOUND_S / 4)  # sooner than a handshake's end
    assert first.recv(1) == b""


@pytest.mark.slow
def test_an_authenticated_member_is_not_closed_for_unauthenticated_connections(
    rendezvous: RendezvousServer, stack: ExitStack
) -> None:
    member = RendezvousClient(HERE, rendezvous.port, SECRET, BOUND_S)
    *_, last = silent(rendezvous.port, 3 * (MEMBERS + MAX_UNAUTHENTICATED), stack)
    last.sendall(b"x" * 32)
    assert last.recv(1)  # all before it were accepted, or closed
    member.set("k", b"an address")
    assert member.get("k", BOUND_S) == b"an address"
    member.close()


@pytest.mark.slow
def test_unauthenticated_connections_are_no_more_than_their_bound(
    rendezvous: RendezvousServer, stack: ExitStack
) -> None:
    *_, last = silent(rendezvous.port, 5 * (MEMBERS + MAX_UNAUTHENTICATED), stack)
    last.sendall(b"x" * 32)
    assert last.recv(1)
    assert len(rendezvous._unauthenticated) <= MEMBERS + MAX_UNAUTHENTICATED


def closes(times: int, port: list[int], behind: RendezvousServer | None) -> threading.Thread:
    """Listens; closes so many connections, and hands the next one to the rendezvous."""
    listener = socket.create_server((HERE, 0))
    port.append(listener.getsockname()[1])

    def serve() -> None:
        with listener:
            for _ in range(times):
                listener.accept()[0].close()
            if behind is not None:
                behind._accept(listener.accept()[0])

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    return thread


def test_a_member_whose_connection_is_closed_connects_again(rendezvous: RendezvousServer) -> None:
    port: list[int] = []
    thread = closes(3, port, rendezvous)
    member = RendezvousClient(HERE, port[0], SECRET, BOUND_S)
    thread.join(BOUND_S)
    member.set("k", b"an address")
    member.close()
    assert rendezvous.get("k", BOUND_S) == b"an address"


def test_a_member_connects_again_until_its_deadline_and_no_longer() -> None:
    port: list[int] = []
    closes(10_000, port, None)
    with pytest.raises(WeightSyncError, match=r"closed \d+ connections within 0.3 s"):
        RendezvousClient(HERE, port[0], SECRET, 0.3)


def test_a_member_does_not_connect_again_to_a_rendezvous_that_is_closed(
    rendezvous: RendezvousServer,
) -> None:
    rendezvous.close()
    with pytest.raises(WeightSyncError, match="refused"):
        RendezvousClient(HERE, rendezvous.port, SECRET, BOUND_S)
