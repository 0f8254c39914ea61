"""The engines' end of transports that move chunks: a backend for vLLM's weight-transfer API.

vLLM loads ``register`` in every one of its processes (entry point ``vllm.general_plugins``).

    init_transfer_engine    join the group                           once per rendezvous
    receive_weights         receive all chunks, then    ┐
                            begin a layer-wise reload,  │ every sync
                            unpack, load                │
    finish_weight_update    finish the reload           ┘

Nothing is loaded before everything is here, which takes the memory of one more copy of the
weights: a transfer that breaks off half-way leaves the old ones as they were.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from async_opd.processes.parent_death import set_parent_death_signal_in_child
from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan
from rollouter.transports.chunks import BACKEND, Receiver

WEIGHTS_UNCHANGED = "no weight was replaced"
"""Part of the error of a transfer that broke off before anything was loaded."""


@dataclass
class ChunkInitInfo(WeightTransferInitInfo):
    """Which rank this engine's first worker has, and ``chunks.chunk_info``."""

    rank_offset: int
    world_size: int
    module: str
    at: dict[str, Any] = field(repr=False)


@dataclass
class ChunkUpdateInfo(WeightTransferUpdateInfo):
    """The tensors of one sync, in the order they are sent."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]


class ChunkEngine(WeightTransferEngine[ChunkInitInfo, ChunkUpdateInfo]):
    """Receives packed chunks from rank 0 and loads them layer by layer."""

    init_info_cls = ChunkInitInfo
    update_info_cls = ChunkUpdateInfo
    _receiver: Receiver | None = None
    _chunk_bytes: int = 0

    def init_transfer_engine(self, init_info: ChunkInitInfo) -> None:
        """Joins the sender's group; a member that does not come in time raises on all sides.

        So does one that does not know the group's secret, be it the sender.
        """
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        told = init_info.at
        at = Rendezvous(**{**told, "secret": bytes.fromhex(told["secret"])})
        self._receiver = None
        module = importlib.import_module(init_info.module)
        self._receiver = module.receiver(at, init_info.rank_offset + worker)
        self._chunk_bytes = at.chunk_bytes

    def start_weight_update(self) -> None:
        """Nothing yet; the engine must be paused."""

    def receive_weights(self, update_info: ChunkUpdateInfo) -> None:
        """Receives all chunks, then loads them layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._receiver is None:
            raise RuntimeError(
                f"{WEIGHTS_UNCHANGED}: weights were sent before this engine joined a transfer group"
            )
        dtypes = [getattr(torch, name) for name in update_info.dtype_names]
        meta = WeightMeta(
            names=tuple(update_info.names),
            dtype_names=tuple(update_info.dtype_names),
            shapes=tuple(tuple(shape) for shape in update_info.shapes),
            itemsizes=tuple(dtype.itemsize for dtype in dtypes),
        )
        try:
            chunks = self._chunks(self._receiver, meta)
        except Exception as error:
            raise RuntimeError(f"{WEIGHTS_UNCHANGED}: {error}") from error
        initialize_layerwise_reload(self.model)
        for chunk, buffer in chunks:
            pieces = torch.split(buffer, [meta.sizes[index] for index in chunk])
            self.model.load_weights(
                (meta.names[index], piece.clone().view(dtypes[index]).view(meta.shapes[index]))
                for index, piece in zip(chunk, pieces, strict=True)
            )

    def _chunks(self, receiver: Receiver, meta: WeightMeta) -> list[tuple[range, torch.Tensor]]:
        """Each has a buffer of its own: layers keep references to it."""
        return [
            (chunk, receiver.receive(sum(meta.sizes[index] for index in chunk)))
            for chunk in chunk_plan(meta.sizes, self._chunk_bytes)
        ]

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
        self._receiver = None


def register() -> None:
    """Makes the backend known to vLLM; safe to call again.

    vLLM calls this in each of its processes. Those below an actor of ours end with it.
    """
    if "ASYNC_OPD_ACTOR" in os.environ:
        set_parent_death_signal_in_child()
    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    if BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ChunkEngine)
