"""FSDP2 on a mesh of one, over NCCL (gloo on a CPU), against the same rank without a mesh.

A mesh of one moves nothing between GPUs: it shows that sharding, mixed precision, gathering the
weights and the collectives' set-up run on this device, and what they cost beside no sharding.

    difference     largest difference of a weight after the same three steps, over the largest
                   change of any weight; by bfloat16 casts in other places it is not 0
    backward_ms    forward and backward pass of one packed row
    weights_ms     gathering all weights for the engines (``Rank.weights``)
    peak_gib       most memory of torch's tensors
"""

from __future__ import annotations

import socket
from typing import Any

import torch

from benchmarks.gpu.measuring import (
    GIB,
    Figures,
    Report,
    device_of,
    milliseconds,
    parser,
    rounded,
)
from benchmarks.gpu.students import rank_of, samples, student
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
Weights = dict[str, torch.Tensor]


def mesh_of_one(device: torch.device) -> Any:
    """The mesh that the trainer's ranks join, with one rank."""
    listener = socket.create_server(("127.0.0.1", 0))
    host, port = listener.getsockname()
    descriptor = listener.detach()  # the store closes it
    spec = RankSpec(0, 1, host, port, TIMEOUT_S, TIMEOUT_S, b"secret", descriptor)
    return join_mesh(spec, device)


def trained(device: torch.device, mesh: Any) -> tuple[Figures, Rank]:
    """Figures of a rank, after three steps."""
    shape, tokens, sequence = SIZES[device.type]
    model = student(shape, device)
    recompute_activations(model)
    rank = rank_of(model, device, mesh)
    batch = samples(rank.vocabularies.student, [sequence] * (tokens // sequence))
    micro_batch = MicroBatch(tuple(batch), (TokenWeight(1 / tokens),) * len(batch))
    for _ in range(STEPS):
        rank.backward([micro_batch])
        rank.apply(RATE)

    def backward() -> None:
        rank.backward([micro_batch])
        rank.optimizer.zero_grad(set_to_none=True)

    ms = milliseconds(device, backward, repeats=3, warm_up=1)
    used = rank.apply(None)
    found = {
        "tokens_per_s": tokens / ms * 1e3,
        "backward_ms": ms,
        "weights_ms": milliseconds(device, lambda: list(rank.weights()), repeats=3, warm_up=1),
        "peak_gib": None if used is None else used.peak / GIB,
    }
    return rounded(found), rank


def weights_of(rank: Rank) -> Weights:
    """Full float32 weights in host memory."""
    return {
        name: full_tensor(parameter.detach()).float().cpu()
        for name, parameter in rank.model.named_parameters()
    }


def difference(one: Weights, other: Weights, first: Weights) -> float:
    """Largest difference of a weight, over the largest change of any weight since the start."""
    apart = max(float((one[name] - other[name]).abs().max()) for name in first)
    return apart / max(float((one[name] - first[name]).abs().max()) for name in first)


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    options = parser(__doc__).parse_args(arguments)
    device = device_of(options)
    report = Report("fsdp", device, options.seconds)
    ends: list[Weights] = []

    def measured(mesh: Any) -> Figures:
        figures, rank = trained(device, mesh)
        ends.append(weights_of(rank))
        return figures

    def compared() -> Figures:
        with_mesh = measured(mesh_of_one(device))
        first = dict(student(SIZES[device.type][0], device).named_parameters())
        start = {name: weight.detach().float().cpu() for name, weight in first.items()}
        return {**with_mesh, **rounded({"difference": difference(ends[0], ends[1], start)}, 3)}

    shape, tokens, _ = SIZES[device.type]
    report.cell(lambda: measured(None), mesh="none", shape=shape, tokens=tokens)
    backend = "nccl" if device.type == "cuda" else "gloo"
    report.cell(compared, mesh=f"one, {backend}", shape=shape, tokens=tokens)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    report.end()


if __name__ == "__main__":
    main()
