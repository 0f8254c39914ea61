"""Training steps of one rank: tokens/s, utilization, memory.

``trainer.rank.Rank`` with students of Qwen3's shapes and random weights, forward KL over the top
64, one packed row of sequences a step; weights float32, computed in bfloat16. Varied: shape, tokens
of the row, recomputed activations, kind of attention. Random weights change no product's time.

    tokens_per_s   tokens of the row over the time of forward and backward pass
    utilization    model FLOPs (trainer/utilization.py) in that time: a share of ``matmul_tflops``
    matmul_tflops  a product of two 8192 x 8192 bfloat16 matrices, measured in the same call
    peak_gib       most memory of torch's tensors: weights, moments and gradients included
    first_ms       the first pass, in which kernels are compiled
    check_s        the check of packed logits on the device (``trainer.student.check``), which
                   raises where they differ from the model's own
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from async_opd.core.errors import StageError
from benchmarks.gpu.measuring import (
    GIB,
    Figures,
    Report,
    Skip,
    device_of,
    finish,
    matmul_tflops,
    milliseconds,
    parser,
    positive,
    rounded,
)
from benchmarks.gpu.students import SHAPES, TrainSettings, rank_of, samples, student
from trainer.batches.micro_batches import MicroBatch
from trainer.batches.token_weights import TokenWeight
from trainer.layers import recompute_activations
from trainer.rank import Rank
from trainer.student.attention_choice import Attention, platform_of
from trainer.student.check import check_rank, check_student
from trainer.student.loading import in_bfloat16, set_attention

ATTENTION: tuple[Attention, ...] = ("varlen", "flash", "flex", "sdpa")
SIZES = {"cuda": ((4096, 16384, 32768), 4096), "cpu": ((64, 128), 64)}
"""Tokens of the rows, and of each sequence in them."""


@dataclass(frozen=True)
class Cell:
    """Varied settings. ``attention``: as ``train.attention``; by ``auto`` the trainer chooses."""

    shape: str
    tokens: int
    recompute: bool
    sequence: int
    attention: Attention = "auto"

    @property
    def lengths(self) -> list[int]:
        """Tokens of the sequences that fill the row."""
        count, rest = divmod(self.tokens, self.sequence)
        return [self.sequence] * count + [rest] * (rest > 1)


def attend(model: Any, wanted: Attention, device: torch.device) -> None:
    """Sets the kind of attention as the trainer does. Skip where it cannot be had."""
    add_grouped_queries_to_varlen()
    model.set_attn_implementation("sdpa")  # what a new model has
    half = in_bfloat16(TrainSettings().dtype, device)
    try:
        set_attention(model, wanted, platform_of(device, half))
    except StageError as error:
        raise Skip(error.cause.partition(": ")[2]) from error


def add_grouped_queries_to_varlen() -> None:
    """Adds the argument ``enable_gqa`` to torch's ``varlen_attn`` where it is older than 2.13.

    There it has none, and its kernel (flash attention 2) takes fewer keys than queries without an
    argument. The trainer does not choose varlen with such a torch; here it is measured all the
    same.
    """
    from torch.nn.attention import varlen

    older = varlen.varlen_attn
    if "enable_gqa" in inspect.signature(older).parameters:
        return

    def varlen_attn(
        *given: Any,
        scale: float | None = None,
        window_size: tuple[int, int] = (-1, -1),
        enable_gqa: bool = False,
    ) -> Any:
        return older(*given, scale=scale, window_size=window_size)

    varlen.varlen_attn = varlen_attn


def built(cell: Cell, device: torch.device) -> Rank:
    """A rank with a new student."""
    model = student(cell.shape, device)
    attend(model, cell.attention, device)
    if cell.recompute:
        recompute_activations(model)
    return rank_of(model, device)


def step(cell: Cell, device: torch.device, peak: float) -> Figures:
    """Figures of one cell; ``peak``: TFLOP/s."""
    rank = built(cell, device)
    batch = samples(rank.vocabularies.student, cell.lengths)
    micro_batch = MicroBatch(tuple(batch), (TokenWeight(1 / cell.tokens),) * len(batch))

    def backward() -> None:
        rank.backward([micro_batch])
        rank.optimizer.zero_grad(set_to_none=True)

    started = time.perf_counter()
    rank.backward([micro_batch])
    finish(device)
    first_ms = 1e3 * (time.perf_counter() - started)
    started = time.perf_counter()
    rank.apply(1e-5)  # AdamW allocates its moments here
    finish(device)
    ms = milliseconds(device, backward, repeats=3, warm_up=1)
    rank.backward([micro_batch])
    apply_ms = milliseconds(device, rank.optimizer.step, repeats=3, warm_up=1)
    used = rank.apply(None)
    answered = [len(sample.rollout.response_ids) for sample in batch]
    tflops = rank.size.training_flops(cell.lengths, answered) / ms / 1e9
    return rounded(
        {
            "attends": rank.model.config._attn_implementation,
            "tokens_per_s": sum(cell.lengths) / ms * 1e3,
            "tflops": tflops,
            "utilization": tflops / peak,
            "backward_ms": ms,
            "apply_ms": apply_ms,
            "first_ms": first_ms,
            "peak_gib": None if used is None else used.peak / GIB,
        }
    )


class Checked:
    """A student whose packed logits are right on a CPU, and which is then checked on the device."""

    def __init__(self, shape: str, device: torch.device) -> None:
        self._shape, self._device = shape, device

    @cached_property
    def _on_cpu(self) -> tuple[Rank, torch.Tensor]:
        """The rank, and the exact logits."""
        model = student(self._shape, torch.device("cpu"))
        exact = check_student(model)
        return rank_of(model, self._device), exact

    def measure(self, attention: Attention) -> Figures:
        """Seconds of the check with this attention, which raises where logits differ."""
        rank, exact = self._on_cpu
        attend(rank.model, attention, self._device)
        started = time.perf_counter()
        check_rank(rank, exact)
        return rounded({"check_s": time.perf_counter() - started})


def cells(device: torch.device, shapes: list[str], tokens: tuple[int, ...]) -> Iterator[Cell]:
    """The trainer's own attention at every size, then each other kind at two sizes."""
    sequence = SIZES[device.type][1]
    for shape in shapes:
        for recompute in (True, False):
            for count in tokens:
                yield Cell(shape, count, recompute, sequence)
    yield Cell(shapes[0], tokens[-1], True, tokens[-1])  # one long sequence
    for attention in ATTENTION:
        for count in tokens[:2]:
            yield Cell(shapes[0], count, False, sequence, attention)


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    made = parser(__doc__)
    made.add_argument("--shapes", help=f"of {', '.join(SHAPES)}; by commas")
    made.add_argument("--tokens", type=positive, help="tokens of a row; by commas")
    options = made.parse_args(arguments)
    device = device_of(options)
    default = "qwen3-0.6b,qwen3-4b" if device.type == "cuda" else "tiny"
    shapes = (options.shapes or default).split(",")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    report = Report("rank", device, options.seconds)
    peak = matmul_tflops(device, dtype)
    report.cell(lambda: rounded({"matmul_tflops": peak}), what="peak", dtype=str(dtype))
    check = Checked(shapes[0], device)
    for attention in ATTENTION:
        report.cell(
            partial(check.measure, attention), what="check", shape=shapes[0], attention=attention
        )
    del check
    for one in cells(device, shapes, options.tokens or SIZES[device.type][0]):
        report.cell(
            partial(step, one, device, peak),
            what="step",
            shape=one.shape,
            tokens=one.tokens,
            sequence=one.sequence,
            recompute=one.recompute,
            attention=one.attention,
        )
    report.end()


if __name__ == "__main__":
    main()
