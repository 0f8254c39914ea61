"""Weights through shared memory: what arrives, what is left behind, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.core.errors import WeightSyncError
from async_opd.weight_sync.layout import WeightMeta
from rollouter.transports.shared_memory import (
    PLACE_BYTES,
    SharedMemory,
    SharedMemoryReceiver,
    SharedMemorySender,
    mapped,
)

HERE, BOUND_S, CHUNK = "127.0.0.1", 30.0, 16
META = WeightMeta(tuple("abc"), ("float32",) * 3, ((3,), (1,), (8,)), (4,) * 3)

Together = Callable[..., list[Future[Any]]]


def weights(value: float) -> list[tuple[str, torch.Tensor]]:
    return [(n, torch.full(s, value)) for n, s in zip(META.names, META.shapes, strict=True)]


def received(receiver: SharedMemoryReceiver) -> list[torch.Tensor]:
    return [receiver.receive(nbytes, BOUND_S).view(torch.float32) for nbytes in (16, 32)]


def memories() -> dict[int, str]:
    """The shared memories that this process has open or mapped, by their inodes."""
    found = {}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the folder's own
            link = os.readlink(f"/proc/self/fd/{fd}")
            if "async_opd weights" in link:
                found[os.stat(f"/proc/self/fd/{fd}").st_ino] = link
    return found


@pytest.fixture
def together() -> Iterator[Together]:
    """Runs functions side by side; returns when all have ended."""
    with ThreadPoolExecutor(8) as pool:

        def run(*works: Callable[[], Any]) -> list[Future[Any]]:
            futures = [pool.submit(work) for work in works]
            for future in futures:
                future.exception(BOUND_S)
            return futures

        yield run
    SharedMemorySender.forget()


def group(together: Together, size: int) -> tuple[SharedMemorySender, list[SharedMemoryReceiver]]:
    sender = SharedMemorySender(HERE, BOUND_S, CHUNK)
    at = sender.open(size)
    joins = (partial(SharedMemoryReceiver, at, rank) for rank in range(1, size))
    _, *joined = together(sender.connect, *joins)
    return sender, [one.result() for one in joined]


def test_all_receivers_read_the_same_memory_sync_after_sync(together: Together) -> None:
    groups, before = [group(together, 3), group(together, 2)], memories().keys()
    for value in (1.0, 2.0):
        for sender, receivers in groups:
            works = [partial(received, receiver) for receiver in receivers]
            _, *got = together(partial(sender.broadcast, weights(value), META), *works)
            assert all(
                torch.equal(t, torch.full_like(t, value)) for one in got for t in one.result()
            )
            assert len(memories().keys() - before) == 1


def test_a_receiver_changes_no_weights_of_another(together: Together) -> None:
    sender, receivers = group(together, 3)
    works = [partial(received, receiver) for receiver in receivers]
    _, one, other = together(partial(sender.broadcast, weights(1.0), META), *works)
    one.result()[0].fill_(7.0)
    assert torch.equal(other.result()[0], torch.ones(4))


def test_the_memory_is_no_file_of_any_folder(together: Together) -> None:
    before = set(os.listdir("/dev/shm"))
    sender, (receiver,) = group(together, 2)
    together(partial(sender.broadcast, weights(1.0), META), partial(received, receiver))
    assert {name for name in set(os.listdir("/dev/shm")) - before if "async_opd" in name} == set()
    assert all(link.endswith("(deleted)") for link in memories().values())


def test_after_a_broken_broadcast_the_next_is_in_other_memory(together: Together) -> None:
    """A receiver that is late may still read the one before."""
    sender, (receiver,) = group(together, 2)
    together(partial(sender.broadcast, weights(1.0), META), partial(received, receiver))
    first = memories().keys()
    sender.close()
    with pytest.raises(AssertionError, match="connected first"):
        sender.broadcast(weights(2.0), META)
    sender, (receiver,) = group(together, 2)
    together(partial(sender.broadcast, weights(3.0), META), partial(received, receiver))
    assert len(memories().keys() - first) == 1


SENDER = """
import json, sys
from rollouter.transports.shared_memory import SharedMemorySender
from tests.rollouter.test_shared_memory import BOUND_S, CHUNK, HERE, META, weights
sender = SharedMemorySender(HERE, BOUND_S, CHUNK)
at = sender.open(2)
print(json.dumps({"port": at.port, "secret": at.secret.hex()}), flush=True)
sender.connect()
sender.broadcast(weights(1.0), META)
sys.stdin.read()
"""


@pytest.mark.slow
def test_a_receiver_has_what_a_trainer_that_was_killed_has_sent_and_nothing_more() -> None:
    """It has mapped the memory; the next receive ends when gloo finds the trainer gone."""
    from async_opd.weight_sync.layout import Rendezvous

    root = str(Path(__file__).parents[2])
    with subprocess.Popen(
        [sys.executable, "-c", SENDER], stdin=-1, stdout=-1, cwd=root, env={**os.environ}
    ) as trainer:
        try:
            opened = json.loads(trainer.stdout.readline())
            secret = bytes.fromhex(opened["secret"])
            at = Rendezvous(HERE, opened["port"], 2, BOUND_S, CHUNK, secret)
            receiver = SharedMemoryReceiver(at, 1)
            first = receiver.receive(16, BOUND_S)
        finally:
            trainer.kill()
    rest = receiver.receive(32, BOUND_S)
    assert torch.equal(torch.cat([first, rest]).view(torch.float32), torch.ones(12))
    with pytest.raises(RuntimeError, match="closed"):
        receiver.receive(16, BOUND_S)


def test_without_room_the_error_has_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = memories()
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(
        WeightSyncError, match=r"no 64 MiB of shared memory.*\n.*sync.backend to gl"
    ):
        SharedMemory(64 << 20)
    assert memories() == before


@pytest.mark.parametrize("elsewhere", [{"pid": 1 << 22}, {}])
def test_an_engine_that_does_not_see_the_trainers_memory_says_which_transport_to_take(
    elsewhere: dict[str, Any],
) -> None:
    """Another machine has no such process, or another one of that number."""
    memory = SharedMemory(256)
    place = {"pid": os.getpid(), "fd": memory.fd, "nbytes": 256, "nonce": "11" * 64} | elsewhere
    message = bytearray(json.dumps(place).encode().ljust(PLACE_BYTES))
    try:
        with pytest.raises(WeightSyncError, match=r"cannot be opened here.*\n.*backend to gloo"):
            mapped(torch.frombuffer(message, dtype=torch.uint8))
    finally:
        memory.close()
