"""Processor time of one sync of a mixture's experts, at both ends; its tensors are tiny.

    Publisher.snapshot ──chunks in memory──► ChunkEngine.receive_weights ──► a model of vLLM

A Qwen3-MoE of 48 layers with 128 experts each, as Qwen3-30B-A3B has them, whose matrices take
8 KiB: what is left is what each tensor costs, whatever its size. In turn the experts of a layer are
sent ``together``, as in a run, and ``apart``, under their checkpoint names. ``sent`` is the number
of tensors, ``meta_bytes`` those of their names and shapes, which go to each worker. Medians of
seconds: ``snapshot_s`` of the trainer, ``received_s`` of an engine whose loader takes the tensors
and drops them, ``loaded_s`` of one whose loader is vLLM's. Engines take digests as in a sync.

``python -m benchmarks.expert_sync`` prints one JSON object last.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from async_opd.weight_sync.layout import Rendezvous, WeightMeta, chunk_plan
from rollouter.transports import chunks

CHUNK_BYTES = 64 << 20
HIDDEN, WIDTH = 64, 32
Named = tuple[str, torch.Tensor]


class Sent(chunks.Receiver):
    """The chunks of a snapshot, from memory."""

    def __init__(self, snapshot: list[Named], meta: WeightMeta) -> None:
        plan = chunk_plan(meta.sizes, CHUNK_BYTES)
        self._chunks = [chunks.packed(snapshot, chunk).clone() for chunk in plan]
        self._next = iter(self._chunks)

    def receive(self, nbytes: int, timeout_s: float) -> torch.Tensor:
        """See Receiver.receive."""
        return next(self._next)

    def close(self) -> None: ...


def student_of(folder: Path, layers: int, experts: int) -> Any:
    """A random mixture, which is saved to the folder."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        vocab_size=1024,
        hidden_size=HIDDEN,
        intermediate_size=WIDTH,
        moe_intermediate_size=WIDTH,
        num_hidden_layers=layers,
        num_experts=experts,
        num_experts_per_tok=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
    )
    student = Qwen3MoeForCausalLM(config)
    student.save_pretrained(folder)
    return student


def of_vllm(folder: Path) -> tuple[Any, Any]:
    """vLLM's configuration and its model of the folder, on the CPU and in this process."""
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model

    torch.accelerator.empty_cache = lambda: None  # as vLLM's worker of CPUs
    args = EngineArgs(
        model=str(folder),
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 20,
    )
    config = args.create_engine_config()
    store = f"file://{folder}/store"
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, store, local_rank=0, backend="gloo")
        initialize_model_parallel()
        return config, get_model(vllm_config=config)


class Engine:
    """A worker's end of a sync, without a worker."""

    def __init__(self, folder: Path) -> None:
        from rollouter.freshness_worker import FreshnessWorker
        from rollouter.transports.engine import ChunkEngine

        self._config, self._model = of_vllm(folder)
        parallel = SimpleNamespace(data_parallel_index=0, world_size=1, rank=0)
        owner: Any = SimpleNamespace(
            parallel_config=parallel, model_config=self._config.model_config
        )
        self._loading = ChunkEngine(owner, owner, torch.device("cpu"), self._model)
        self._loading._at = Rendezvous("", 0, 2, 600.0, CHUNK_BYTES, b"")
        self._worker = FreshnessWorker()
        self._worker.model_runner = SimpleNamespace(get_model=lambda: self._model)
        self._worker.weight_transfer_engine = self._loading

    def seconds(self, snapshot: list[Named], meta: WeightMeta, drops: bool = False) -> float:
        """Processor time of receiving a snapshot; ``drops``: its loader takes the tensors only."""
        from vllm.config import set_current_vllm_config

        from rollouter.transports.engine import ChunkUpdateInfo

        self._loading._receiver = Sent(snapshot, meta)
        update = ChunkUpdateInfo(
            list(meta.names), list(meta.dtype_names), [list(shape) for shape in meta.shapes]
        )
        model: Any = type(self._model)
        load = model.load_weights
        if drops:
            model.load_weights = lambda _, weights: deque(weights, maxlen=0)
        try:
            with set_current_vllm_config(self._config):
                started = time.process_time()
                self._worker.record_received()
                self._loading.receive_weights(update)
                found = self._worker.received_digests()
                self._loading.finish_weight_update()
                seconds = time.process_time() - started
        finally:
            model.load_weights = load
        assert tuple(found.values()) == meta.digests
        return seconds


def snapshot_seconds(publisher: Any) -> float:
    """Processor time of a snapshot."""
    started = time.process_time()
    publisher.snapshot()
    return time.process_time() - started


def median(repeats: int, work: Callable[[], float]) -> float:
    """Of so many runs, after one that warms up."""
    work()
    return round(statistics.median(work() for _ in range(repeats)), 3)


def measured(student: Any, engine: Engine, together: bool, repeats: int) -> dict[str, Any]:
    """The figures of one way."""
    from trainer.publisher import Publisher
    from trainer.student.named_weights import named_weights

    source = partial(named_weights, student, torch.float32, copied=False, changing=together)
    never: Any = None
    publisher = Publisher(source, never, True, CHUNK_BYTES)
    snapshot_s = median(repeats, partial(snapshot_seconds, publisher))
    sent = publisher._snapshot, publisher.meta
    return {
        "sent": len(publisher.meta.names),
        "meta_bytes": len(json.dumps([publisher.meta.names, publisher.meta.shapes])),
        "snapshot_s": snapshot_s,
        "received_s": median(repeats, partial(engine.seconds, *sent, drops=True)),
        "loaded_s": median(repeats, partial(engine.seconds, *sent)),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--experts", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        student = student_of(Path(name), options.layers, options.experts)
        engine = Engine(Path(name))
        figures = {
            "together": measured(student, engine, True, options.repeats),
            "apart": measured(student, engine, False, options.repeats),
        }
        print(json.dumps(figures))


if __name__ == "__main__":
    main()
