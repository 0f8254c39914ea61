"""vLLM's own ``nccl`` weight transfer: the transport of GPUs. Not yet run on a GPU.

The engines' end is vLLM's ``NCCLWeightTransferEngine``. The built-in trainer engine gives every
engine the same ``rank_offset``; with several independent replicas their ranks would collide, so
``async_opd.weight_sync`` gives the ranks.

Members connect by NCCL's unique id, which they receive over Ray, and by no store: vLLM's store
accepts every connection and unpickles its content. NCCL refuses a connection without the 64 random
bits of the id.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from rollouter.transports.chunks import Sender

if TYPE_CHECKING:
    import torch

BACKEND = "nccl"
DEVICES = ("cuda",)


class NcclSender(Sender):
    """Sends over vLLM's PyNcclCommunicator, in vLLM's packed format."""

    _group: Any = None

    def listen(self) -> tuple[str, int, bytes]:
        """Makes the group's unique id; NCCL listens from now on, on an interface of its choice.

        NCCL_SOCKET_IFNAME chooses: the loopback in a local run (``models.engine_args.LOOPBACK``).
        """
        from vllm.distributed.device_communicators.pynccl_wrapper import NCCLLibrary

        return "", 0, bytes(NCCLLibrary().ncclGetUniqueId().internal)

    def connect(self) -> None:
        """Joins as rank 0, on the current GPU."""
        import torch
        from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

        device = torch.cuda.current_device()
        self._group = uid_init_process_group(self.secret, 0, self.world_size, device)

    def broadcast(self, weights: list[tuple[str, torch.Tensor]], meta: WeightMeta) -> None:
        """Sends in vLLM's packed format; both ends derive the same chunks from ``meta``."""
        import torch
        from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_producer

        packed_nccl_broadcast_producer(
            iterator=iter(weights),
            group=self._group,
            src=0,
            post_iter_func=lambda item: item[1],
            buffer_size_bytes=self.chunk_bytes,
        )
        torch.cuda.synchronize()

    def close(self) -> None:
        """See Sender.close."""
        self._group = None


sender = NcclSender


def engine_info(at: Rendezvous) -> dict[str, Any]:
    """What vLLM's ``NCCLWeightTransferInitInfo`` takes, beside the ranks."""
    return {
        "nccl_unique_id_b64": base64.b64encode(at.secret).decode(),
        "packed": True,
        "packed_buffer_size_bytes": at.chunk_bytes,
    }
