"""The trainer's end of vLLM's own ``nccl`` weight transfer. Not yet run on a GPU.

Lives beside the engines' end because both are vLLM's: the communicator and the packed wire format.
The built-in trainer engine gives every engine the same ``rank_offset``; with several independent
replicas their ranks would collide, so the ranks are ours (weight_sync.py).

Members meet by NCCL's unique id, which they get over Ray, and by no store: vLLM's is open to
everybody who finds its port, and unpickles what is in it. NCCL lets nobody in who does not know the
64 random bits of the id.
"""

from __future__ import annotations

import base64
from typing import Any

import torch

from async_opd.weight_sync.layout import Rendezvous, WeightMeta


class NcclTransport:
    """Implements ``trainer.publisher.Transport`` over vLLM's PyNcclCommunicator."""

    def __init__(self, timeout_s: float, chunk_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._chunk_bytes = chunk_bytes
        self._world_size = 0
        self._unique_id = b""
        self._group: Any = None

    def open(self, world_size: int) -> Rendezvous:
        """Makes the group's unique id; NCCL listens from now on, on an interface of its choice.

        NCCL_SOCKET_IFNAME chooses: the loopback in a local run (``models.engine_args.LOOPBACK``).
        """
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        self._world_size = world_size
        self._unique_id = bytes(NCCLLibrary().ncclGetUniqueId().internal)
        return Rendezvous(
            "", 0, world_size, self._timeout_s, self._chunk_bytes, secret=self._unique_id
        )

    def connect(self) -> None:
        """Joins as rank 0, on the current GPU."""
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        device = torch.cuda.current_device()
        self._group = uid_init_process_group(self._unique_id, 0, self._world_size, device)

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> None:
        """Sends in vLLM's packed format; both ends derive the same chunks from ``meta``."""
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(weights),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self._chunk_bytes,
        )
        torch.cuda.synchronize()

    def close(self) -> None:
        """See Transport.close."""
        self._group = None


def nccl_info(rendezvous: Rendezvous) -> dict[str, Any]:
    """What an engine is told, beside its ranks: vLLM's ``NCCLWeightTransferInitInfo``."""
    return {
        "nccl_unique_id_b64": base64.b64encode(rendezvous.secret).decode(),
        "packed": True,
        "packed_buffer_size_bytes": rendezvous.chunk_bytes,
    }
