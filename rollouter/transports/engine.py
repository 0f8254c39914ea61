"""The engines' end of all transports: a backend for vLLM's weight-transfer API.

vLLM loads ``register`` in every one of its processes (entry point ``vllm.general_plugins``).

    init_transfer_engine    leave the group before, join the next one    once per rendezvous
    receive_weights         begin a layer-wise reload,  ┐
                            receive, unpack, load       │ every sync
    finish_weight_update    finish the reload           ┘

    experts.*.gate_proj.weight+up_proj.weight  ──one digest──► views ──► experts.0.gate_proj.weight
    [experts, rows of both, columns]                                     experts.0.up_proj.weight …

An engine on a CPU receives all chunks (``Receiver.staged``) before the first is loaded: a transfer
that breaks off half-way leaves the old weights as they were. For an engine on a GPU each chunk is
loaded when it comes, also one in host memory, where every worker would hold the whole model: an
interrupted transfer has to be sent again, as a whole.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from types import MappingProxyType
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from async_opd.models.lm_head import pack_again
from async_opd.processes.own_settings import set_parent_death_signal_in_child
from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan, experts_apart
from rollouter.transports.chunks import BACKEND, Receiver, SecondsLeft

Chunk = tuple[range, torch.Tensor]
Named = tuple[str, torch.Tensor]

WEIGHTS_UNCHANGED = "no weight was replaced"
"""Part of the error of a transfer that broke off before anything was loaded."""
WEIGHTS_MIXED = "some weights were replaced"
"""Part of the error of one that broke off later. Another whole transfer sets all weights."""


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
    adapter: Mapping[str, torch.Tensor] = MappingProxyType({})
    """The adapter that was received last; empty in engines that get whole weights."""
    passing: Callable[[Iterator[Named]], Iterator[Named]] = staticmethod(iter)
    """Through it the tensors go as they came, on their way to the model's loader."""
    _receiver: Receiver | None = None
    _at: Rendezvous

    def init_transfer_engine(self, init_info: ChunkInitInfo) -> None:
        """Leaves the group before and joins the sender's.

        Raises, at every member, if one of them does not join in time or does not know the group's
        secret, be it the sender.
        """
        self.shutdown()
        parallel = self.parallel_config
        worker = parallel.data_parallel_index * parallel.world_size + parallel.rank
        fields = init_info.at
        at = Rendezvous(**{**fields, "secret": bytes.fromhex(fields["secret"])})
        module = importlib.import_module(init_info.module)
        self._receiver = module.receiver(at, init_info.rank_offset + worker)
        self._at = at

    def start_weight_update(self) -> None:
        """Nothing yet; the engine must be paused."""

    def receive_weights(self, update_info: ChunkUpdateInfo) -> None:
        """Receives the chunks, and loads them layer by layer.

        An error in loading is raised after the last chunk: until then the other members need this
        end of the broadcast.
        """
        from vllm.model_executor.model_loader.reload import (
            finalize_layerwise_reload,
            initialize_layerwise_reload,
        )

        if self._receiver is None:
            raise RuntimeError(
                f"{WEIGHTS_UNCHANGED}: weights were sent before this engine joined a transfer group"
            )
        meta = WeightMeta(
            names=tuple(update_info.names),
            dtype_names=tuple(update_info.dtype_names),
            shapes=tuple(tuple(shape) for shape in update_info.shapes),
            itemsizes=tuple(getattr(torch, name).itemsize for name in update_info.dtype_names),
        )
        coming = self._chunks(self._receiver, meta)
        try:
            staged = (self._receiver.staged and self.device.type == "cpu") or meta.adapters
            came = list(coming) if staged else [next(coming)]
        except Exception as error:
            raise RuntimeError(f"{WEIGHTS_UNCHANGED}: {error}") from error
        if meta.adapters:
            self.adapter = dict(chain.from_iterable(_unpacked(meta, *one) for one in came))
            return
        initialize_layerwise_reload(self.model)
        fault: Exception | None = None
        try:
            for chunk, buffer in chain(_emptied(came), coming):
                fault = fault or self._load(meta, chunk, buffer)
        except Exception as error:
            finalize_layerwise_reload(self.model, self.model_config)  # vLLM cannot begin twice
            raise fault or RuntimeError(f"{WEIGHTS_MIXED}: {error}") from error
        if fault is not None:
            raise fault

    def _chunks(self, receiver: Receiver, meta: WeightMeta) -> Iterator[Chunk]:
        """Each has a separate buffer: layers keep references to it."""
        left = SecondsLeft(self._at.broadcast_s(meta.nbytes))
        for chunk in chunk_plan(meta.sizes, self._at.chunk_bytes):
            yield chunk, receiver.receive(sum(meta.sizes[index] for index in chunk), left())

    def _load(self, meta: WeightMeta, chunk: range, buffer: torch.Tensor) -> Exception | None:
        """Loads the tensors of a chunk; returns the error if it fails."""
        try:
            self.model.load_weights(experts_apart(self.passing(_unpacked(meta, chunk, buffer))))
        except Exception as error:
            return error
        return None

    def finish_weight_update(self) -> None:
        """Finishes the reload, and packs again what a CPU's kernels want packed.

        An adapter is loaded after it (``rollouter.freshness_worker``).
        """
        from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        if self.adapter:
            return
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu":
            pack_again(self.model, ParallelLMHead)

    def shutdown(self) -> None:
        """Leaves the group."""
        if self._receiver is not None:
            self._receiver.close()
            self._receiver = None


def _unpacked(
    meta: WeightMeta, chunk: range, buffer: torch.Tensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The named tensors of a chunk."""
    pieces = torch.split(buffer, [meta.sizes[index] for index in chunk])
    for index, piece in zip(chunk, pieces, strict=True):
        whole = piece.clone() if len(chunk) > 1 else piece  # at an address that suits its dtype
        dtype = getattr(torch, meta.dtype_names[index])
        yield meta.names[index], whole.view(dtype).view(meta.shapes[index])


def _emptied(chunks: list[Chunk]) -> Iterator[Chunk]:
    """The chunks, each of which the list no longer holds."""
    while chunks:
        yield chunks.pop(0)


def register() -> None:
    """Makes the backend known to vLLM; safe to call again.

    vLLM calls this in each of its processes. Those below an actor of ours end with it.
    """
    if "ASYNC_OPD_ACTOR" in os.environ:
        set_parent_death_signal_in_child()
    registry: dict[str, Any] = WeightTransferEngineFactory._registry
    if BACKEND not in registry:
        WeightTransferEngineFactory.register_engine(BACKEND, ChunkEngine)
