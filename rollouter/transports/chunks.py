"""The trainer's end of the transports: a group in which the trainer is rank 0.

    weights ──chunk_plan──► packed chunk · chunk · chunk ──send──► engine.py: ChunkEngine

A transport that moves bytes is a ``Sender`` with ``send`` and a ``Receiver``; vLLM's side of it is
``rollouter.transports.engine`` then. One with a wire format of its own has its own ``broadcast``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Protocol

from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan

if TYPE_CHECKING:
    import torch

BACKEND = "async_opd_chunks"
"""vLLM's name of ``rollouter.transports.engine.ChunkEngine``."""


class Sender(ABC):
    """The trainer's end of one group; implements ``trainer.publisher.Transport``."""

    ports: range | None = None
    """The ports to listen on; None for any."""

    def __init__(self, host: str, timeout_s: float, chunk_bytes: int) -> None:
        """``host``: the address to listen on. ``timeout_s`` bounds each wait for the others."""
        self.host = host
        self.timeout_s = timeout_s
        self.chunk_bytes = chunk_bytes
        self.world_size = 0
        self.secret = b""

    def open(self, world_size: int) -> Rendezvous:
        """Opens the rendezvous of ``world_size`` ranks, which listens when this returns."""
        self.world_size = world_size
        host, port, self.secret = self.listen()
        return Rendezvous(host, port, world_size, self.timeout_s, self.chunk_bytes, self.secret)

    @abstractmethod
    def listen(self) -> tuple[str, int, bytes]:
        """Opens the rendezvous: host, port, and the secret by which members authenticate."""

    @abstractmethod
    def connect(self) -> None:
        """Waits for the others; raises when they are late, or do not authenticate."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the group, and closes the rendezvous. A second call does nothing."""

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> None:
        """Sends all tensors, in order; each chunk is packed just before it is sent."""
        for chunk in chunk_plan(meta.sizes, self.chunk_bytes):
            self.send(packed(weights, chunk))

    def send(self, chunk: torch.Tensor) -> None:
        """Sends bytes (uint8, on the CPU) to every receiver."""
        raise NotImplementedError(f"{type(self).__name__} has neither send nor broadcast")


class Receiver(Protocol):
    """One worker's end: ``receiver(at, rank)`` of the module joins the group as ``rank``."""

    def receive(self, nbytes: int) -> torch.Tensor:
        """The next chunk: a tensor (uint8, on the CPU) of its own. Raises after ``timeout_s``."""
        ...


def packed(weights: list[tuple[str, torch.Tensor]], chunk: range) -> torch.Tensor:
    """The bytes of some of the tensors, one behind the other, on the CPU."""
    import torch

    pieces = [weights[index][1].contiguous().view(-1).view(torch.uint8) for index in chunk]
    return torch.cat(pieces).cpu()


def chunk_info(module: str, at: Rendezvous) -> dict[str, Any]:
    """``Transport.engine_info`` of a transport whose engines' end is ``module.receiver``."""
    return {"module": module, "at": {**asdict(at), "secret": at.secret.hex()}}
