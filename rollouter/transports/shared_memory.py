"""Weights in memory that the trainer shares with the engines of its machine: no bytes over TCP.

    trainer: snapshot ──one copy──► shared memory ◄──maps── every worker of every engine
                 └──── where it is, 256 bytes over gloo ───────┘

The group is gloo's, with its secret, its bounds, and its notice of members that died. The memory
is a file without a name (memfd), which a worker opens through /proc: it is in no folder, so nothing
of it is left when the trainer and the workers are gone, however they ended, and the size of
/dev/shm does not limit it. A worker's mapping is private: it changes no other process's weights.
"""

from __future__ import annotations

import json
import mmap
import os
import secrets
import time
from typing import TYPE_CHECKING, Any

from async_opd.core.errors import WeightSyncError
from async_opd.weight_sync.layout import WeightMeta, chunk_plan
from rollouter.transports.chunks import SecondsLeft, packed
from rollouter.transports.gloo import DEVICES, GlooReceiver, GlooSender

if TYPE_CHECKING:
    import torch

__all__ = ["DEVICES", "receiver", "sender"]

PLACE_BYTES = 256
"""Of the message that says where the memory is."""
NONCE_BYTES = 64
"""At the start of the memory: by these a worker knows that it has opened the right one. Tensors
begin behind them, at an address that suits every dtype."""


class SharedMemory:
    """A mapped file of a fixed size, without a name; it is freed with its last mapping."""

    def __init__(self, nbytes: int) -> None:
        """WeightSyncError if the machine, or the container, has no room for it."""
        import torch

        self.nbytes = nbytes
        self.fd = os.memfd_create("async_opd weights", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, nbytes)  # else writing to a missing page is a SIGBUS
            self.bytes: Any = torch.frombuffer(mmap.mmap(self.fd, nbytes), dtype=torch.uint8)
        except OSError as error:
            os.close(self.fd)
            cause = f"no {nbytes >> 20} MiB of shared memory for the weights: {error.strerror}"
            remedy = "give the machine or container more memory, or set sync.backend to gloo"
            raise WeightSyncError("weight sync", cause, remedy) from error

    def close(self) -> None:
        """Ends further openings; mappings stay."""
        os.close(self.fd)


class SharedMemorySender(GlooSender):
    """Copies a snapshot into the memory, and says where it is.

    All groups of the process share one memory: their broadcasts come one after the other, and a
    receiver has loaded the weights, or is replaced, before the next snapshot is made.
    """

    _memory: SharedMemory | None = None

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> float:
        """See Sender.broadcast. WeightSyncError if the weights do not fit."""
        import torch

        left = SecondsLeft(self.broadcast_s(meta.nbytes))
        memory, nonce = self._room(NONCE_BYTES + meta.nbytes), secrets.token_bytes(NONCE_BYTES)
        memory.bytes[:NONCE_BYTES] = torch.frombuffer(bytearray(nonce), dtype=torch.uint8)
        end = NONCE_BYTES
        for chunk in chunk_plan(meta.sizes, self.chunk_bytes):
            data = packed(weights, chunk)
            memory.bytes[end : end + len(data)].copy_(data)
            end += len(data)
            left()
        place = {"pid": os.getpid(), "fd": memory.fd, "nbytes": memory.nbytes, "nonce": nonce.hex()}
        message = bytearray(json.dumps(place).encode().ljust(PLACE_BYTES))
        try:
            started = time.perf_counter()
            self.send(torch.frombuffer(message, dtype=torch.uint8), left())
            return time.perf_counter() - started
        except BaseException:
            self.forget()  # a receiver that is late may still read it
            raise

    def _room(self, nbytes: int) -> SharedMemory:
        kept = SharedMemorySender._memory
        if kept is None or kept.nbytes != nbytes:
            self.forget()
            kept = SharedMemorySender._memory = SharedMemory(nbytes)
        return kept

    @staticmethod
    def forget() -> None:
        """Closes the memory; the next snapshot is in another one."""
        if SharedMemorySender._memory is not None:
            SharedMemorySender._memory.close()
        SharedMemorySender._memory = None


class SharedMemoryReceiver(GlooReceiver):
    """Chunks are parts of the memory that it maps; the first one waits for the sender."""

    _rest: torch.Tensor | None = None

    def receive(self, nbytes: int, timeout_s: float) -> torch.Tensor:
        """See Receiver.receive. WeightSyncError on another machine than the trainer's."""
        if self._rest is None or not len(self._rest):
            self._rest = mapped(super().receive(PLACE_BYTES, timeout_s))
        chunk, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return chunk

    def close(self) -> None:
        """See Receiver.close."""
        super().close()
        self._rest = None


def mapped(message: torch.Tensor) -> torch.Tensor:
    """The weights in the memory that the sender's message names. WeightSyncError without it."""
    import torch

    place = json.loads(message.numpy().tobytes())
    path, nonce = f"/proc/{place['pid']}/fd/{place['fd']}", bytes.fromhex(place["nonce"])
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = mmap.mmap(fd, place["nbytes"], access=mmap.ACCESS_COPY)
        finally:
            os.close(fd)
        if found[:NONCE_BYTES] != nonce:
            raise ValueError("it is another process's")
    except (OSError, ValueError) as error:
        cause = f"the trainer's shared memory {path} cannot be opened here: {error}"
        remedy = "set sync.backend to gloo: this engine is on another machine, or in a container"
        raise WeightSyncError("weight sync", cause, remedy) from error
    return torch.frombuffer(found, dtype=torch.uint8)[NONCE_BYTES:]


sender, receiver = SharedMemorySender, SharedMemoryReceiver
