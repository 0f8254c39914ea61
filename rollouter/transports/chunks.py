"""Shared by all transports: a group in which the trainer is rank 0, and packed chunks of bytes.

    weights ──chunk_plan──► packed chunk · chunk · chunk ──send──► receive ──► engine.py: vLLM

A transport is a ``Sender`` and a ``Receiver`` that move bytes; vLLM's side of all of them is
``rollouter.transports.engine``.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from async_opd.core.errors import WeightSyncError
from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan

if TYPE_CHECKING:
    import torch

BACKEND = "async_opd_chunks"
"""vLLM's name of ``rollouter.transports.engine.ChunkEngine``."""


class SecondsLeft:
    """Counts down the seconds of one broadcast of all chunks."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._end = time.monotonic() + timeout_s

    def __call__(self) -> float:
        """Seconds until the end; WeightSyncError after it."""
        left = self._end - time.monotonic()
        if left <= 0:
            raise BrokenOff(f"it was not complete after {self._timeout_s:g} s")
        return left


class BrokenOff(WeightSyncError):
    """A broadcast ended before all chunks were sent: not all members took part in time."""

    def __init__(self, why: str) -> None:
        cause = f"the broadcast broke off: {why}; a member died or hangs"
        remedy = "lower sync.min_mib_per_s if the network is slower than that"
        super().__init__("weight sync", cause, remedy)
        self.args = (why,)


class Sender(ABC):
    """The trainer's end of one group; implements ``trainer.publisher.Transport``."""

    ports: range | None = None
    """The ports to listen on; None for any."""
    seconds_per_byte = 0.0
    """Added to ``timeout_s`` for each byte of a broadcast."""

    def __init__(self, host: str, timeout_s: float, chunk_bytes: int) -> None:
        """``host``: the address to listen on. ``timeout_s`` bounds ``connect``.

        A broadcast may take longer, by its bytes: see ``broadcast_s``.
        """
        self.host = host
        self.timeout_s = timeout_s
        self.chunk_bytes = chunk_bytes
        self.world_size = 0
        self.secret = b""

    def open(self, world_size: int) -> Rendezvous:
        """Opens the rendezvous of ``world_size`` ranks, which listens when this returns."""
        self.world_size = world_size
        host, port, self.secret = self.listen()
        bounds = (self.timeout_s, self.chunk_bytes)
        return Rendezvous(host, port, world_size, *bounds, self.secret, self.seconds_per_byte)

    def broadcast_s(self, nbytes: int) -> float:
        """See Rendezvous.broadcast_s."""
        return self.timeout_s + nbytes * self.seconds_per_byte

    @abstractmethod
    def listen(self) -> tuple[str, int, bytes]:
        """Opens the rendezvous: host, port, and the secret by which members authenticate."""

    @abstractmethod
    def connect(self) -> None:
        """Waits for the others; raises when they are late, or do not authenticate."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group, and closes the rendezvous. A second call does nothing."""

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> float:
        """Sends all tensors, in order; a chunk is packed just before it is sent, if it has to be.

        Returns the seconds in ``send``. Raises when all takes longer than ``broadcast_s``.
        """
        left, sending = SecondsLeft(self.broadcast_s(meta.nbytes)), 0.0
        for chunk in chunk_plan(meta.sizes, self.chunk_bytes):
            data = packed(weights, chunk)
            started = time.perf_counter()
            self.send(data, left())
            sending += time.perf_counter() - started
        return sending

    @abstractmethod
    def send(self, chunk: torch.Tensor, timeout_s: float) -> None:
        """Sends bytes (uint8, of the host or a GPU) to every receiver; raises after the bound."""


class Receiver(ABC):
    """One worker's end: ``receiver(at, rank)`` of the module joins the group as ``rank``."""

    staged = True
    """Whether chunks are in host memory: then an engine on a CPU replaces no weight before the last
    one is here."""

    @abstractmethod
    def receive(self, nbytes: int, timeout_s: float) -> torch.Tensor:
        """The next chunk: a separate tensor (uint8). Raises after the bound."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group. A second call does nothing."""


def packed(weights: list[tuple[str, torch.Tensor]], chunk: range) -> torch.Tensor:
    """The bytes of some of the tensors, one behind the other: a copy unless they lie so already."""
    import torch

    parts = [weights[index][1].contiguous().view(-1).view(torch.uint8) for index in chunk]
    place = parts[0].data_ptr()
    for part in parts:
        if part.data_ptr() != place or not _same_memory(part, parts[0]):
            return torch.cat(parts)
        place += part.numel()
    size = sum(part.numel() for part in parts)
    return parts[0].as_strided((size,), (1,), parts[0].storage_offset())


def _same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def chunk_info(module: str, at: Rendezvous) -> dict[str, Any]:
    """An engine's arguments for joining the group by ``module.receiver``, in JSON's types.

    Its ranks are not among it.
    """
    return {"module": module, "at": {**asdict(at), "secret": at.secret.hex()}}
