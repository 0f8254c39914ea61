"""A checkpoint of two ranks: each writes its shards, or the first one gathers and writes all.

    sharded    each rank: its parts ──copied──► host memory ──► its file, flushed, SHA-256
    gathered   all ranks: each tensor ──gathered──► rank 0's host memory ──► one file, the same

A random student of ``--layers`` layers of 53 MB with AdamW's moments, over gloo. Training waits for
``capture_s``; ``write_s`` is beside it. Times are medians of the slowest rank. ``peak_ratio`` is
the private memory (``benchmarks.load_memory``) that the fullest rank takes beyond what it has, over
its share of the state; ``gathered_…`` is the same of the other way.

``python -m benchmarks.checkpoint`` prints one JSON object last.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.files.durable import written_file
from benchmarks.load_memory import PrivatePeak
from benchmarks.local_ranks import in_processes
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.rank_group import RankGroup, RankSpec
from trainer.saving.shards import Stamp
from trainer.saving.state import training_state
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import full_tensor, join_mesh, own_part

CPU = torch.device("cpu")
RANKS = 2


Part = Callable[[], object]
Way = Callable[[Rank, str], tuple[Part, Part]]
"""Makes the copying and the writing of a checkpoint, of a rank and into a folder."""


def student(layers: int) -> Any:
    """The same random weights in every process."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": layers}
    return Qwen3ForCausalLM(Qwen3Config(vocab_size=8192, num_attention_heads=16, **sizes))


def made_rank(spec: RankSpec, layers: int) -> Rank:
    """A rank with moments."""
    objective = build_objective(ForwardKLConfig())
    rank = Rank(
        PlacedStudent(student(layers), objective, TrainConfig(), CPU, mesh=join_mesh(spec, CPU))
    )
    for parameter in rank.model.parameters():
        parameter.grad = torch.ones_like(parameter)
    rank.apply(1e-4)
    return rank


def sharded(rank: Rank, folder: str) -> tuple[Part, Part]:
    """Each rank writes its own parts."""
    return lambda: rank.state.capture(Stamp(1, 1, RANKS, "")), lambda: rank.write(folder)


def gathered(rank: Rank, folder: str) -> tuple[Part, Part]:
    """The first rank gathers and writes all, as ``async_opd`` did before it wrote shards."""
    first = torch.distributed.get_rank() == 0
    held: dict[str, torch.Tensor] = {}

    def capture() -> None:
        for name, tensor in training_state(rank.model, rank.optimizer):
            whole = full_tensor(tensor.detach())
            if first:
                held[name] = whole.to("cpu", copy=True).contiguous()

    def write() -> None:
        if first:
            save_file(held, Path(folder) / "trainer.safetensors")
            written_file(Path(folder) / "trainer.safetensors")
        held.clear()

    return capture, write


def seconds(part: Part) -> float:
    """Of the slowest rank; a collective."""
    torch.distributed.barrier()
    started = time.perf_counter()
    part()
    return worst(time.perf_counter() - started)


def worst(value: float) -> float:
    """The largest of all ranks' values; a collective."""
    found = torch.tensor(value, dtype=torch.float64)
    torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
    return float(found)


def measured(spec: RankSpec, sizes: argparse.Namespace, way: Way, folder: str) -> dict[str, float]:
    """Figures of one way, in every rank."""
    rank = made_rank(spec, sizes.layers)
    share = sum(own_part(t).nbytes for _, t in training_state(rank.model, rank.optimizer))
    capture, write = way(rank, folder)
    ctypes.CDLL(None).malloc_trim(0)  # what making the student left would be used again
    with PrivatePeak() as memory:
        times = [(seconds(capture), seconds(write)) for _ in range(sizes.rounds)]
    return {
        "share_mb": round(share / 1e6),
        "capture_s": round(statistics.median(one for one, _ in times), 2),
        "write_s": round(statistics.median(one for _, one in times), 2),
        "peak_ratio": round(worst(memory.nbytes) / share, 2),
    }


def checkpoints(sizes: argparse.Namespace, way: Way) -> dict[str, float]:
    """Figures of one way, of two ranks in separate processes."""
    with tempfile.TemporaryDirectory() as folder:

        def lead(spec: RankSpec | None, _: RankGroup) -> dict[str, float]:
            assert spec is not None
            return measured(spec, sizes, way, folder)

        def follow(spec: RankSpec) -> Any:
            measured(spec, sizes, way, folder)

        found: dict[str, float] = in_processes(RANKS, lead, follow, 600)
    return found


def figures(sizes: argparse.Namespace) -> dict[str, float]:
    """The figures of the module."""
    before = {f"gathered_{name}": value for name, value in checkpoints(sizes, gathered).items()}
    del before["gathered_share_mb"]
    return {**checkpoints(sizes, sharded), **before}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    print(json.dumps(figures(parser.parse_args())))


if __name__ == "__main__":
    main()
