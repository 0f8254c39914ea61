"""Generation stall of a weight sync from a sharded trainer to real engines, and its memory.

    2 gloo ranks: Learner ──Publisher──► chunks over gloo ──► 2 StudentReplicas: vLLM engines
    the same connection:  the same bytes, received only; then the engines load what they received

A random Qwen3 of about 0.5 GB in float32. The engines generate all the time. In turn a sync
(snapshot, then push, with the default proofs) and the bare parts, which the engines run while they
are paused as in a sync: broadcast of the same chunks from one buffer, and vLLM's own reload of the
same tensors from memory. ``stall_ratio`` is the median of syncs' longest stall of a replica over
the bare parts' seconds right after it. ``snapshot_s`` is how long the training thread is occupied.
``extra_bytes_ratio``: private memory (benchmarks.load_memory) of rank 0's process in a sync beyond
that before it, at most, over two chunks and the largest layer; the first sync, which allocates the
snapshot's buffers, does not count.

``python -m benchmarks.weight_sync`` prints one JSON object last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from async_opd.config.sections.engine import EngineConfig
from async_opd.models.engine_args import engine_env, engine_kwargs
from async_opd.weight_sync.layout import WeightMeta, chunk_plan
from benchmarks.bare_worker import WORKER
from benchmarks.load_memory import PrivatePeak, model_in_child
from benchmarks.local_ranks import in_processes
from trainer.rank_group import RankGroup, RankSpec

CPU = torch.device("cpu")
REPLICAS, RANKS, VOCABULARY = 2, 2, 8192
BOUND_S = 300.0


def rank_of(path: Path, spec: RankSpec | None) -> Any:
    """A rank of the trainer, which loads its part."""
    from async_opd.config.sections.loss import ForwardKLConfig
    from async_opd.config.sections.train import TrainConfig
    from trainer.losses import build_objective
    from trainer.rank import Rank
    from trainer.student.loading import EmptyStudent
    from trainer.student.placed import PlacedStudent
    from trainer.student.sharding import join_mesh

    torch.set_num_threads(1)
    mesh = None if spec is None else join_mesh(spec, CPU)
    student = EmptyStudent(path)
    objective, train = build_objective(ForwardKLConfig()), TrainConfig(dtype="float32")
    return Rank(
        PlacedStudent(
            student.model, objective, train, CPU, mesh=mesh, fill=partial(student.fill, CPU)
        )
    )


def make_replicas(path: Path) -> list[Any]:
    """Engines that are being built."""
    from async_opd.core.stages import SamplingSpec
    from async_opd.queue.message_queue import MessageQueue
    from rollouter import engine as engine_module
    from rollouter.replica import StudentReplica
    from rollouter.spec import StudentEngineSpec

    kwargs = engine_kwargs(
        EngineConfig(max_num_seqs=4, cpu_kv_cache_mib=256, max_model_len=2048),
        model=str(path),
        device="cpu",
        tensor_parallel=1,
        seed=0,
        trust_remote_code=False,
    )
    queue = MessageQueue(("prompts", "dead"), 100, 1 << 30, 60.0)
    engine_module.EXTENSION = WORKER
    sampling = SamplingSpec(1500, 1.0, 1.0, 1)
    specs = (
        StudentEngineSpec(f"student/{index}", kwargs, sampling, (), "gloo")
        for index in range(REPLICAS)
    )
    return [StudentReplica(spec, queue) for spec in specs]


async def generate(replica: Any) -> None:
    """Keeps two requests in flight for as long as it runs."""
    from async_opd.core.samples import Prompt

    prompt = Prompt("p", "s", "t", np.arange(1, 9, dtype=np.int32))
    while True:
        await replica.generate([prompt, prompt], replica._spec.sampling)


class Bare:
    """The parts of a sync that cannot be left out, on the connection of the sync."""

    def __init__(self, replicas: Sequence[Any], publisher: Any, chunk_bytes: int) -> None:
        self._replicas, self._publisher, self._chunk_bytes = replicas, publisher, chunk_bytes

    async def seconds(self, meta: WeightMeta) -> dict[str, float]:
        """Of the broadcast to all replicas, and of the load in all of them at once."""
        plan = chunk_plan(meta.sizes, self._chunk_bytes)
        sizes = [sum(meta.sizes[index] for index in chunk) for chunk in plan]
        buffers = [torch.ones(size, dtype=torch.uint8) for size in sizes]
        await asyncio.gather(*(replica.pause("keep") for replica in self._replicas))
        started = time.perf_counter()
        await asyncio.gather(
            self._on_all("bare_receive", sizes), asyncio.to_thread(self._send, buffers)
        )
        broadcast = time.perf_counter() - started
        del buffers
        layout = (list(meta.names), list(map(list, meta.shapes)), list(map(list, plan)))
        started = time.perf_counter()
        await self._on_all("bare_load", *layout)
        load = time.perf_counter() - started
        for replica in self._replicas:
            await replica.resume()
        return {"broadcast": broadcast, "load": load}

    def _send(self, buffers: Sequence[torch.Tensor]) -> None:
        (transport,) = self._publisher._transports.values()
        for buffer in buffers:
            transport.send(buffer, 60.0)

    async def _on_all(self, method: str, *arguments: Any) -> None:
        await asyncio.gather(*(r._rpc(method, *arguments) for r in self._replicas))


async def measured(learner: Any, path: Path, repeats: int, chunk_bytes: int) -> dict[str, Any]:
    """The figures, after one sync that warms up."""
    from async_opd.config.sections.reliability import SupervisionConfig
    from async_opd.processes.members import MemberSet, Policy
    from async_opd.weight_sync.coordinator import BroadcastSync
    from rollouter.transports.gloo import GlooSender
    from trainer.publisher import Publisher
    from trainer.stage import TrainerStage

    publisher = Publisher(
        partial(learner.named_weights, copied=False),
        lambda: GlooSender("127.0.0.1", 60.0, chunk_bytes),
        digests=True,
        chunk_bytes=chunk_bytes,
    )
    stage = TrainerStage(
        learner, publisher, cast(Any, None), max_version_lag=None, model_dir=str(path)
    )
    replicas = make_replicas(path)
    busy: list[asyncio.Task[None]] = []
    try:
        for replica in replicas:
            await replica.ready()
        named = {f"student/{index}": replica for index, replica in enumerate(replicas)}
        policy = Policy[Any](supervision=SupervisionConfig(), rebuild=cast(Any, None))
        members: Any = MemberSet("rollout", named, policy)
        sync = BroadcastSync(stage, members, [1] * REPLICAS, on_sync="keep", timeout_s=BOUND_S)
        await sync.connect()
        bare = Bare(replicas, publisher, chunk_bytes)
        busy = [asyncio.create_task(generate(replica)) for replica in replicas]
        seen = []
        for version in range(1, 2 + repeats):
            with PrivatePeak() as peak:
                started = time.perf_counter()
                await sync.snapshot(version)
                snapshot_s = time.perf_counter() - started
                metrics = (await sync.push()).metrics
            parts = await bare.seconds(publisher.meta)
            seen.append((metrics["sync/stall_max_s"], parts, peak.nbytes, snapshot_s))
            print(f"stall {seen[-1][0]:.2f} s, bare {parts}, {peak.nbytes >> 20} MiB", flush=True)
        return figures(seen[1:], publisher.meta, chunk_bytes)
    finally:
        for task in busy:
            task.cancel()
        for replica in replicas:
            await replica.shutdown()


def figures(seen: Sequence[Any], meta: WeightMeta, chunk_bytes: int) -> dict[str, Any]:
    """Medians over the pairs."""
    layers: dict[str, int] = {}
    for name, size in zip(meta.names, meta.sizes, strict=True):
        layer = ".".join(name.split(".")[:3])
        layers[layer] = layers.get(layer, 0) + size
    ratios = [stall / sum(parts.values()) for stall, parts, _, _ in seen]
    extra = statistics.median(nbytes for _, _, nbytes, _ in seen)
    return {
        "mb": round(meta.nbytes / 1e6),
        "stall_ratio": round(statistics.median(ratios), 3),
        "stall_ratios": [round(ratio, 2) for ratio in sorted(ratios)],
        "stall_s": round(statistics.median(stall for stall, _, _, _ in seen), 3),
        "broadcast_s": round(statistics.median(p["broadcast"] for _, p, _, _ in seen), 3),
        "load_s": round(statistics.median(p["load"] for _, p, _, _ in seen), 3),
        "snapshot_s": round(statistics.median(s for _, _, _, s in seen), 3),
        "extra_bytes_ratio": round(extra / (2 * chunk_bytes + max(layers.values())), 3),
    }


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--layers", type=int, default=9)
    parser.add_argument("--chunk-mib", type=int, default=64)
    options = parser.parse_args()
    os.environ.update(engine_env("cpu"))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        model_in_child(path, vocabulary=VOCABULARY, layers=options.layers, hidden=1024)

        def lead(spec: RankSpec | None, rank_group: RankGroup) -> dict[str, Any]:
            from trainer.learner import Learner

            learner = Learner(rank_of(path, spec), rank_group=rank_group)
            work = measured(learner, path, options.repeats, options.chunk_mib << 20)
            return asyncio.run(work)

        def follow(spec: RankSpec) -> Any:
            from trainer.follower import Follower

            return Follower(rank_of(path, spec))

        print(json.dumps(in_processes(RANKS, lead, follow, 1200)))


if __name__ == "__main__":
    main()
