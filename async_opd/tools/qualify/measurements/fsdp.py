"""A student sharded with FSDP2 over ranks, over NCCL (gloo on a CPU), against a lone rank.

A mesh of one moves nothing between GPUs: it shows that sharding, mixed precision, gathering the
weights and the collectives' set-up run on this device, and what they cost beside no sharding. The
ranks of a mesh of two are processes, each on another GPU; all train the same samples.

    difference     norm of the weights' difference after the same three steps, over the norm of
                   their change; by bfloat16 casts in other places it is not 0
    backward_ms    forward and backward pass of all micro-batches of a step
    weights_ms     gathering all weights for the engines (``FullWeights.sent``)
    peak_gib       most memory of torch's tensors
    norm_ratio     norm of the first step's gradient over that of the lone rank: a gradient that is
                   scaled wrongly makes nearly the same steps of AdamW
    communicator_gib  GPU memory that the first collective takes on the first rank's GPU
"""

from __future__ import annotations

import math
import multiprocessing
import socket
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from async_opd.tools.qualify.measurements.measuring import (
    GIB,
    Figures,
    Report,
    milliseconds,
    used_gib,
)
from async_opd.tools.qualify.measurements.students import TrainSettings, rank_of, samples, student
from trainer.batches.micro_batches import MicroBatch
from trainer.batches.token_weights import TokenWeight
from trainer.layers import recompute_activations
from trainer.rank import Rank
from trainer.rank_group import RankSpec
from trainer.student.sharding import full_tensor, join_mesh

STEPS, RATE = 3, 1e-4
SIZES = {"cuda": ("qwen3-0.6b", 8192, 2048), "cpu": ("tiny", 128, 64)}
"""Shape, tokens of the row and of each sequence."""
TIMEOUT_S = 60.0
Way = dict[str, Any]
WAYS: dict[str, Way] = {
    "sharded": {},
    "reduced once a step": {"reduce_gradients": "step"},
    "reduced each micro-batch": {"reduce_gradients": "micro_batch"},
    "moments in host memory": {"offload": "moments"},
    "parameters in host memory": {"offload": "parameters"},
    "rows shared": {"context_parallel": 2},
}
"""Settings of ``train``, by name."""
Weights = dict[str, torch.Tensor]


def spec_of(rank: int, ranks: int, port: int, listener: int | None = None) -> RankSpec:
    """A rank of this machine."""
    return RankSpec(rank, ranks, "127.0.0.1", port, TIMEOUT_S, TIMEOUT_S, b"secret", listener)


def device_of(kind: str, rank: int) -> torch.device:
    """The rank's device, which becomes the current one."""
    if kind == "cuda":
        torch.cuda.set_device(rank)
        return torch.device("cuda", rank)
    return torch.device("cpu")


def trained(device: torch.device, mesh: Any, way: Way) -> tuple[Figures, Rank]:
    """Figures of a rank, after three steps. Ranks that share rows all compute all of them."""
    shape, tokens, sequence = SIZES[device.type]
    model = student(shape, device)
    recompute_activations(model)
    rank = rank_of(model, device, mesh, replace(TrainSettings(), **way))
    batch = samples(rank.student.vocabularies.student, [sequence] * (tokens // sequence))
    own = slice(None)
    if mesh is not None and "context_parallel" not in way:
        own = slice(mesh.get_rank(), None, mesh.size())
    half = len(batch[own]) // 2 or 1
    parts = [batch[own][:half], batch[own][half:]]
    work = [MicroBatch(tuple(p), (TokenWeight(1 / tokens),) * len(p)) for p in parts if p]
    norms = []
    for _ in range(STEPS):
        norms.append(rank.backward(work).norm)
        rank.apply(RATE)

    def backward() -> None:
        rank.backward(work)
        rank.optimizer.zero_grad(set_to_none=True)

    ms = milliseconds(device, backward, repeats=3, warm_up=1)
    used = rank.apply(None)
    found = {
        "gradient_norm": norms[0],
        "tokens_per_s": tokens / ms * 1e3,
        "backward_ms": ms,
        "weights_ms": milliseconds(device, lambda: list(rank.weights.sent()), repeats=3, warm_up=1),
        "peak_gib": None if used is None else used.peak / GIB,
    }
    return found, rank


def follow(rank: int, ranks: int, port: int, kind: str, way: Way) -> None:
    """The work of a rank but the first, in its process."""
    if kind == "cpu":
        torch.set_num_threads(1)
    device = device_of(kind, rank)
    mesh = join_mesh(spec_of(rank, ranks, port), device)
    torch.distributed.all_reduce(torch.ones(1, device=device))
    weights_of(trained(device, mesh, way)[1])


def on_mesh(kind: str, ranks: int, way: Way) -> tuple[Figures, Weights]:
    """The first rank's figures and the full weights; the other ranks are processes meanwhile."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    spawn = multiprocessing.get_context("spawn").Process
    given = [(rank, ranks, port, kind, way) for rank in range(1, ranks)]
    others = [spawn(target=follow, args=one, daemon=True) for one in given]
    for other in others:
        other.start()
    try:
        device = device_of(kind, 0)
        before = used_gib()  # a context is there already
        mesh = join_mesh(spec_of(0, ranks, port, listener.detach()), device)  # the store closes it
        torch.distributed.all_reduce(torch.ones(1, device=device))
        taken = {"communicator_gib": used_gib()[0] - before[0]} if kind == "cuda" else {}
        figures, rank = trained(device, mesh, way)
        return {**figures, **taken}, weights_of(rank)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        for other in others:
            other.join(TIMEOUT_S)
            other.kill()


def weights_of(rank: Rank) -> Weights:
    """Full float32 weights in host memory."""
    return {
        name: full_tensor(parameter.detach()).float().cpu()
        for name, parameter in rank.model.named_parameters()
    }


def difference(one: Weights, other: Weights, first: Weights) -> float:
    """Norm of the difference of all weights, over the norm of their change since the start."""
    apart = sum(float((one[name] - other[name]).square().sum()) for name in first)
    return math.sqrt(apart / sum(float((one[name] - first[name]).square().sum()) for name in first))


def main(report: Report, *ways: str) -> None:
    """The WAYS of these names on two ranks; without any, a mesh of one."""
    device = report.device
    ranks = 2 if ways else 1
    lone: list[tuple[float, Weights]] = []

    def alone() -> Figures:
        figures, rank = trained(device, None, {})
        lone.append((figures["gradient_norm"], weights_of(rank)))
        return figures

    def compared(way: Way) -> Figures:
        figures, weights = on_mesh(device.type, ranks, way)
        first = dict(student(SIZES[device.type][0], device).named_parameters())
        start = {name: weight.detach().float().cpu() for name, weight in first.items()}
        norm, other = lone[0]
        found = {
            "difference": difference(other, weights, start),
            "norm_ratio": figures["gradient_norm"] / norm,
        }
        return {**figures, **found}

    shape, tokens, _ = SIZES[device.type]
    report.cell(alone, what="alone", mesh="none", shape=shape, tokens=tokens)
    backend = "nccl" if device.type == "cuda" else "gloo"
    for name in ways or ("sharded",):
        mesh = f"{ranks}, {backend}"
        work = partial(compared, WAYS[name])
        report.cell(work, what="mesh", mesh=mesh, way=name, shape=shape, tokens=tokens)
