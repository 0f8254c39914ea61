"""A meeting that strangers crowd: members come in all the same."""

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
def meeting() -> Iterator[RendezvousServer]:
    made = RendezvousServer(HERE, SECRET, MEMBERS, BOUND_S)
    yield made
    made.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as opened:
        yield opened


def silent(port: int, count: int, stack: ExitStack) -> list[socket.socket]:
    """Connections that say nothing."""
    return [
        stack.enter_context(socket.create_connection((HERE, port), BOUND_S)) for _ in range(count)
    ]


def test_a_member_comes_to_a_meeting_that_silent_strangers_fill(
    meeting: RendezvousServer, stack: ExitStack
) -> None:
    silent(meeting.port, 2 * (MEMBERS + MAX_UNAUTHENTICATED), stack)
    visit = RendezvousClient(HERE, meeting.port, SECRET, BOUND_S)
    visit.set("k", b"an address")
    visit.close()
    assert meeting.get("k", BOUND_S) == b"an address"


def test_the_stranger_that_came_first_is_dropped_for_the_next_visitor(
    meeting: RendezvousServer, stack: ExitStack
) -> None:
    first = silent(meeting.port, 1, stack)[0]
    silent(meeting.port, MEMBERS + MAX_UNAUTHENTICATED, stack)
    first.settimeout(BOUND_S / 4)  # sooner than a handshake's end
    assert first.recv(1) == b""


def test_a_member_that_has_shown_the_secret_is_not_dropped_for_strangers(
    meeting: RendezvousServer, stack: ExitStack
) -> None:
    visit = RendezvousClient(HERE, meeting.port, SECRET, BOUND_S)
    *_, last = silent(meeting.port, 3 * (MEMBERS + MAX_UNAUTHENTICATED), stack)
    last.sendall(b"x" * 32)
    assert last.recv(1)  # all before it were let in, or dropped
    visit.set("k", b"an address")
    assert visit.get("k", BOUND_S) == b"an address"
    visit.close()


def test_strangers_hold_no_more_places_than_there_are(
    meeting: RendezvousServer, stack: ExitStack
) -> None:
    *_, last = silent(meeting.port, 5 * (MEMBERS + MAX_UNAUTHENTICATED), stack)
    last.sendall(b"x" * 32)
    assert last.recv(1)
    assert len(meeting._unauthenticated) <= MEMBERS + MAX_UNAUTHENTICATED


def hangs_up(times: int, port: list[int], behind: RendezvousServer | None) -> threading.Thread:
    """Listens; hangs up so many times, then hands what comes to the meeting."""
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


def test_a_member_that_is_hung_up_on_comes_again(meeting: RendezvousServer) -> None:
    port: list[int] = []
    thread = hangs_up(3, port, meeting)
    visit = RendezvousClient(HERE, port[0], SECRET, BOUND_S)
    thread.join(BOUND_S)
    visit.set("k", b"an address")
    visit.close()
    assert meeting.get("k", BOUND_S) == b"an address"


def test_a_member_comes_again_until_its_deadline_and_no_longer() -> None:
    port: list[int] = []
    hangs_up(10_000, port, None)
    with pytest.raises(WeightSyncError, match=r"closed \d+ connections within 0.3 s"):
        RendezvousClient(HERE, port[0], SECRET, 0.3)


def test_a_member_does_not_come_again_to_a_meeting_that_is_closed(
    meeting: RendezvousServer,
) -> None:
    meeting.close()
    with pytest.raises(WeightSyncError, match="refused"):
        RendezvousClient(HERE, meeting.port, SECRET, BOUND_S)
