"""vLLM 0.32's use of CUDA streams when weights are sent, without vLLM.

``current_stream`` is ``vllm.utils.torch_utils.current_stream``, ``packed_producer`` is
``vllm.distributed.weight_transfer.packed_tensor.packed_nccl_broadcast_producer``: the same
operations in the same order. On a device without streams every operation runs at once, where it
stands.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from itertools import cycle
from typing import Any, Protocol

import torch

BUFFERS = 2
_of_thread = threading.local()

NamedTensors = Iterator[tuple[str, torch.Tensor]]


class Group(Protocol):
    """The receivers of chunks."""

    def broadcast(self, chunk: torch.Tensor, src: int) -> None:
        """Queues the chunk (uint8) on the current stream."""


def current_stream() -> Any:
    """The thread's stream. The first call on a thread makes one and sets it, for good."""
    if getattr(_of_thread, "stream", None) is None:
        stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream())
        torch.cuda.set_stream(stream)
        _of_thread.stream = stream
    return _of_thread.stream


class _NoStream:
    """Stands for a stream where the device has none."""

    def synchronize(self) -> None:
        """There is nothing to wait for."""


@cache
def _streams(device: torch.device) -> tuple[Any, ...]:
    """The same streams in every call: memory that is freed is kept for its stream."""
    cuda = device.type == "cuda"
    made: Any = torch.cuda.Stream
    return tuple(made(device) if cuda else _NoStream() for _ in range(BUFFERS))


def _on(stream: Any) -> AbstractContextManager[Any]:
    return nullcontext() if isinstance(stream, _NoStream) else torch.cuda.stream(stream)


def packed_producer(
    weights: NamedTensors, group: Group, buffer_bytes: int, device: torch.device
) -> None:
    """Packs tensors into chunks of a little more than ``buffer_bytes`` and broadcasts them.

    Each chunk is packed and sent on one of two separate streams, which wait for nothing but their
    own last chunk.
    """
    streams = _streams(device)
    in_flight: dict[int, torch.Tensor] = {}  # a chunk that is still being sent keeps its memory
    for slot in cycle(range(BUFFERS)):
        streams[slot].synchronize()
        in_flight.pop(slot, None)
        with _on(streams[slot]):
            chunk = _pack(weights, buffer_bytes)
            if chunk is None:
                break
            group.broadcast(chunk, src=0)
            in_flight[slot] = chunk
    for stream in streams:
        stream.synchronize()


def _pack(weights: NamedTensors, buffer_bytes: int) -> torch.Tensor | None:
    """Bytes of the next tensors, until they are more than ``buffer_bytes``; None without any."""
    pieces, size = [], 0
    for _, tensor in weights:
        pieces.append(tensor.contiguous().view(-1).view(torch.uint8))
        size += pieces[-1].numel()
        if size > buffer_bytes:
            break
    return torch.cat(pieces) if pieces else None
