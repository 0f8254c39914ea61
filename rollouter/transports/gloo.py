"""The engines' end of the weight sync: a gloo backend for vLLM's weight-transfer API.

vLLM loads ``register`` in every one of its processes (entry point ``vllm.general_plugins``). On
GPUs vLLM's own ``nccl`` backend serves; this one does the same over gloo where there are none:

    init_transfer_engine    join the group                           once per rendezvous
    receive_weights         receive all chunks, then    ┐
                            begin a layer-wise reload,  │ every sync
                            unpack, load                │
    finish_weight_update    finish the reload           ┘

Nothing is loaded before everything is here, which takes the memory of one more copy of the
weights: a transfer that breaks off half-way leaves the old ones as they were.
"""

from __future__ import annotations

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
from async_opd.weight_sync.gloo_group import GlooGroup, GroupMember, gloo_group
from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan
from async_opd.weight_sync.rendezvous import RendezvousClient

BACKEND = "async_opd_gloo"
WEIGHTS_UNCHANGED = "no weight was replaced"
"""Part of the error of a transfer that broke off before anything was loaded."""


@dataclass
class GlooInitInfo(WeightTransferInitInfo):
    """Where the group meets and which rank this engine's first worker has; ``secret`` in hex."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    timeout_s: float
    chunk_bytes: int
    secret: str = field(repr=False)


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
    _made: GlooGroup | None = None
    _chunk_bytes: int = 0

    def init_transfer_engine(self, init_info: GlooInitInfo) -> None:
        """Joins the sender's group; a member that does not come in time raises on all sides.

        So does one that does not know the group's secret, be it the sender.
        """
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        secret, timeout_s = bytes.fromhex(init_info.secret), init_info.timeout_s
        client = RendezvousClient(
            init_info.master_address, init_info.master_port, secret, timeout_s
        )
        rank = init_info.rank_offset + worker
        member = GroupMember(rank, init_info.world_size, client.address, secret, timeout_s)
        self._made = None
        try:
            self._made = gloo_group(torch, member, client)
        finally:
            client.close()
        self._chunk_bytes = init_info.chunk_bytes

    def start_weight_update(self) -> None:
        """Nothing yet; the engine must be paused."""

    def receive_weights(self, update_info: GlooUpdateInfo) -> None:
        """Receives all chunks, then loads them layer by layer."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        if self._made is None:
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
            chunks = self._chunks(self._made.group, meta)
        except RuntimeError as error:
            raise RuntimeError(f"{WEIGHTS_UNCHANGED}: {error}") from error
        initialize_layerwise_reload(self.model)
        for chunk, buffer in chunks:
            pieces = torch.split(buffer, [meta.sizes[index] for index in chunk])
            self.model.load_weights(
                (meta.names[index], piece.clone().view(dtypes[index]).view(meta.shapes[index]))
                for index, piece in zip(chunk, pieces, strict=True)
            )

    def _chunks(self, group: Any, meta: WeightMeta) -> list[tuple[range, torch.Tensor]]:
        """Each has a buffer of its own: layers keep references to it."""
        chunks = []
        for chunk in chunk_plan(meta.sizes, self._chunk_bytes):
            buffer = torch.empty(sum(meta.sizes[index] for index in chunk), dtype=torch.uint8)
            group.broadcast(buffer, 0).wait()
            chunks.append((chunk, buffer))
        return chunks

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
        self._made = None


def gloo_info(rendezvous: Rendezvous) -> dict[str, Any]:
    """What an engine is told of where its group meets, beside its ranks; see ``GlooInitInfo``."""
    return {
        "master_address": rendezvous.host,
        "master_port": rendezvous.port,
        "timeout_s": rendezvous.timeout_s,
        "chunk_bytes": rendezvous.chunk_bytes,
        "secret": rendezvous.secret.hex(),
    }


def register() -> None:
    """Makes the backend known to vLLM; safe to call again.

    vLLM calls this in each of its processes. Those below an actor of ours end with it.
    """
    if "ASYNC_OPD_ACTOR" in os.environ:
        set_parent_death_signal_in_child()
    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    if BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(BACKEND, GlooWeightTransferEngine)
