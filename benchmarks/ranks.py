"""Optimizer steps of a sharded student, against one rank: time, and memory of each rank.

    1 rank     one process, no process group
    N ranks    as many processes, FSDP2 over gloo, the same batches

A random Qwen3 model (8 layers, hidden 256, vocabulary 32,000), top-64 scores, float32, one thread a
process; in turn, medians. ``speedup`` is tokens per second of N ranks over those of one,
``scaling`` what that is for each further rank (``plan.train.scaling``): (speedup - 1) / (N - 1).
``bytes_ratio`` is weights, gradients and moments on the first rank, over all of them.
``difference`` is the largest one of the weights after the same steps.

``python -m benchmarks.ranks`` prints one JSON object last. More ranks than cores measure nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import TopK
from benchmarks.local_ranks import in_processes
from trainer.follower import Follower
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.rank_group import RankGroup, RankSpec
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import join_mesh

CPU = torch.device("cpu")
VOCABULARY, K = 32_000, 64
TRAIN = TrainConfig(lr=1e-4, steps=100, warmup_steps=0)


@dataclass(frozen=True)
class Measured:
    """Of one trainer: seconds of each step, tokens of each, its first rank's bytes, its weights."""

    seconds: list[float]
    tokens: int
    bytes: int
    weights: dict[str, Any] = field(repr=False)


def student(layers: int) -> Any:
    """The same random weights in every process."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=False,
    )
    return Qwen3ForCausalLM(config)


def batch(seed: int, size: int, tokens: int) -> list[Sample]:
    """Samples of 32 prompt tokens and up to ``tokens`` of response, with random scores."""
    draw = np.random.default_rng(seed)
    return [
        _sample(draw, index, int(draw.integers(tokens // 2, tokens + 1))) for index in range(size)
    ]


def _sample(draw: np.random.Generator, index: int, length: int) -> Sample:
    prompt = Prompt(f"p{index}", "s", "t", draw.integers(0, VOCABULARY, 32, dtype=np.int32))
    ids = draw.integers(0, VOCABULARY, length, dtype=np.int32)
    support = np.stack([draw.choice(VOCABULARY, K, replace=False) for _ in range(length)])
    logprobs = np.sort(np.log(draw.dirichlet(np.ones(K), length) * 0.9), axis=1)[:, ::-1]
    own = np.full(length, -8.0, dtype=np.float32)
    rollout = Rollout.plain(
        uid=f"p{index}/0",
        prompt=prompt,
        response_ids=ids,
        rollout_logprobs=own,
        version_spans=(VersionSpan(0, 0, length),),
        finish_reason="stop",
    )
    return Sample(rollout, TopK(support.astype(np.int32), logprobs.astype(np.float32), own))


def measured(ranks: int, sizes: argparse.Namespace) -> Measured:
    """Steps of a trainer with so many ranks."""
    objective = build_objective(ForwardKLConfig())

    def lead(spec: RankSpec | None, rank_group: RankGroup) -> Measured:
        model = student(sizes.layers)
        mesh = None if spec is None else join_mesh(spec, CPU)
        learner = Learner(
            Rank(PlacedStudent(model, objective, TRAIN, CPU, mesh=mesh)), rank_group=rank_group
        )
        batches = [batch(seed, sizes.batch, sizes.tokens) for seed in range(sizes.steps)]
        seconds = []
        for samples in batches:
            started = time.perf_counter()
            learner.train_batch(samples)
            seconds.append(time.perf_counter() - started)
        weights = {name: weight.numpy() for name, weight in learner.named_weights()}
        tokens = sum(sample.rollout.tokens for sample in batches[-1])
        return Measured(seconds[1:], tokens, held(learner), weights)

    def follow(spec: RankSpec) -> Follower:
        model = student(sizes.layers)
        return Follower(
            Rank(PlacedStudent(model, objective, TRAIN, CPU, mesh=join_mesh(spec, CPU)))
        )

    found: Measured = in_processes(ranks, lead, follow, 600)
    return found


def held(learner: Learner) -> int:
    """Bytes of weights, gradients and two moments on this rank."""
    parameters = learner.model.parameters()
    return sum(4 * 4 * getattr(p, "to_local", lambda p=p: p)().numel() for p in parameters)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    for name, value in (("ranks", 2), ("layers", 8), ("batch", 32), ("tokens", 128)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    sizes = parser.parse_args()
    runs: dict[int, list[Measured]] = {1: [], sizes.ranks: []}
    for _ in range(sizes.repeats):
        for ranks, seen in runs.items():
            seen.append(measured(ranks, sizes))
            print(f"{ranks} ranks: {statistics.median(seen[-1].seconds):.2f} s a step", flush=True)
    rates = {
        ranks: statistics.median(s.tokens / statistics.median(s.seconds) for s in seen)
        for ranks, seen in runs.items()
    }
    one, many = runs[1][-1], runs[sizes.ranks][-1]
    speedup = rates[sizes.ranks] / rates[1]
    difference = max(
        float(np.abs(many.weights[name] - weight).max()) for name, weight in one.weights.items()
    )
    print(
        json.dumps(
            {
                "ranks": sizes.ranks,
                "tokens_per_s": round(rates[sizes.ranks], 1),
                "tokens_per_s_one": round(rates[1], 1),
                "speedup": round(speedup, 3),
                "scaling": round((speedup - 1) / (sizes.ranks - 1), 3),
                "bytes_ratio": round(many.bytes / one.bytes, 3),
                "difference": difference,
            }
        )
    )


if __name__ == "__main__":
    main()
