"""A student engine's worker that receives weights and loads them without a sync around it.

See benchmarks.weight_sync.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch

from rollouter.freshness_worker import FreshnessWorker

WORKER = "benchmarks.bare_worker.BareWorker"


class BareWorker(FreshnessWorker):
    """``on_workers`` calls its methods by name, while the engine is paused."""

    if TYPE_CHECKING:
        weight_transfer_engine: Any
        vllm_config: Any

    def bare_receive(self, sizes: list[int]) -> float:
        """Receives chunks of these bytes and keeps them; seconds."""
        started = time.perf_counter()
        receiver = self.weight_transfer_engine._receiver
        self._chunks = [receiver.receive(size, 60.0) for size in sizes]
        return time.perf_counter() - started

    def bare_load(
        self, names: list[str], shapes: list[list[int]], chunks: list[list[int]]
    ) -> float:
        """Loads the float32 tensors of the chunks as the engine reloads a model; seconds."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        started = time.perf_counter()
        engine = self.weight_transfer_engine
        weights = []
        for indices, buffer in zip(chunks, self._chunks, strict=True):
            pieces = buffer.view(torch.float32).split(
                [torch.Size(shapes[i]).numel() for i in indices]
            )
            weights += [(names[i], p.view(shapes[i])) for i, p in zip(indices, pieces, strict=True)]
        with set_current_vllm_config(self.vllm_config):
            initialize_layerwise_reload(engine.model)
            engine.model.load_weights(iter(weights))
            engine.finish_weight_update()
        self._chunks = []
        return time.perf_counter() - started
