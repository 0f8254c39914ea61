"""The engines' end of the weight sync: a gloo backend for vLLM's weight-transfer API.

vLLM loads ``register`` in every one of its processes (entry point ``vllm.general_plugins``). On
GPUs vLLM's own ``nccl`` backend serves; this one does the same over gloo where there are none:

    init_transfer_engine    join the group                           once per rendezvous
    start_weight_update     begin a layer-wise reload   ┐
    receive_weights         chunk by chunk: receive,    │ every sync
                            unpack, load                │
    finish_weight_update    finish the reload           ┘
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import (  # type: ignore[attr-defined]
    PrefixStore,
    ProcessGroupGloo,
    TCPStore,
)
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from async_opd.core.orphans import die_with_parent
from async_opd.core.weights import WeightMeta, chunk_plan

BACKEND = "async_opd_gloo"


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the group meets and which rank this engine's first worker has."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float
    chunk_bytes: int


@dataclass
class GlooUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of one sync, in the order they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class GlooWeightTransferEngine(WeightTransferEngine[GlooInitInfo, GlooUpdateInfo]):
    """Receives broadcasts of packed chunks from rank 0 and loads them layer by layer."""

    init_info_cls = GlooInitInfo
    update_info_cls = GlooUpdateInfo
    _group: Any = None  # ProcessGroupGloo, untyped in torch
    _chunk_bytes: int = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the sender's group; a member that does not come in time raises on all sides."""
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        timeout = timedelta(seconds=init_info.timeout_s)
        store = TCPStore(
            init_info.master_address, init_info.master_port, is_master=False, timeout=timeout
        )
        self._group = ProcessGroupGloo(
            PrefixStore("weights", store),
            init_info.rank_offset + worker,
            init_info.world_size,
            timeout,
        )
        self._chunk_bytes = init_info.chunk_bytes

    def start_weight_update(self) -> None:
        """Begins a layer-wise reload; the engine must be paused."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receives all chunks. Each has a buffer of its own: layers keep references to it."""
        if self._group is None:
            raise RuntimeError("weights were sent before this engine joined a transfer group")
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        meta = WeightMeta(
            names=tuple(update_info.names),
            dtype_names=tuple(update_info.dtype_names),
            shapes=tuple(tuple(shape) for shape in update_info.shapes),
            itemsizes=tuple(dtype.itemsize for dtype in dtypes),
        )
        for chunk in chunk_plan(meta.sizes, self._chunk_bytes):
            sizes = [meta.sizes[index] for index in chunk]
            buffer = torch.empty(sum(sizes), dtype=torch.uint8)
            self._group.broadcast(buffer, 0).wait()
            pieces = torch.split(buffer, sizes)
            self.model.load_weights(
                (meta.names[index], piece.clone().view(dtypes[index]).view(meta.shapes[index]))
                for index, piece in zip(chunk, pieces, strict=True)
            )

    def finish_weight_update(self) -> None:
        """Finishes the reload, and rebuilds the head's packed copy, which the reload leaves stale.

        On CPU, a ``ParallelLMHead`` that shares its tensor with the embedding keeps a packed copy
        of the old weights otherwise (measured with vLLM 0.32: logits off by 2 nats).
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        for module in self.model.modules():
            if isinstance(module, ParallelLMHead):
                module.quant_method.process_weights_after_loading(module)

    def shutdown(self) -> None:
        """Leaves the group."""
        self._group = None


def register() -> None:
    """Makes the backend known to vLLM; safe to call again.

    vLLM calls this in each of its processes. Those below an actor of ours end with it.
    """
    if "ASYNC_OPD_BOX" in os.environ:
        die_with_parent()
    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    if BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
