"""The trainer's end of vLLM's own ``nccl`` weight transfer. Not yet run on a GPU.

Lives beside the engines' end because both are vLLM's: the communicator, the packed wire format and
the rendezvous. The built-in trainer engine gives every engine the same ``rank_offset``; with
several independent replicas their ranks would collide, so the ranks are ours (weight_sync.py).
"""

from __future__ import annotations

import socket
from typing import Any

import torch

from async_opd.core.weights import Rendezvous, WeightMeta


class NcclTransport:
    """Implements ``trainer.publish.Transport`` over vLLM's PyNcclCommunicator."""

    def __init__(self, host: str, timeout_s: float, chunk_bytes: int) -> None:
        self._rendezvous = Rendezvous(host, 0, 0, timeout_s, chunk_bytes)
        self._group: Any = None

    def open(self, world_size: int) -> Rendezvous:
        """Picks a free port; vLLM's store is opened on it by ``connect``, which blocks."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = int(probe.getsockname()[1])
        old = self._rendezvous
        self._rendezvous = Rendezvous(old.host, port, world_size, old.timeout_s, old.chunk_bytes)
        return self._rendezvous

    def connect(self) -> None:
        """Joins as rank 0, on the current GPU."""
        from vllm.distributed.weight_transfer.nccl_common import stateless_init_process_group

        at = self._rendezvous
        device = torch.cuda.current_device()
        self._group = stateless_init_process_group(at.host, at.port, 0, at.world_size, device)

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> None:
        """Sends in vLLM's packed format; both ends derive the same chunks from ``meta``."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(weights),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self._rendezvous.chunk_bytes,
        )
        torch.cuda.synchronize()
