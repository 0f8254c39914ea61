"""Training steps of one rank: tokens/s, utilization, memory.

``trainer.rank.Rank`` with students of Qwen3's shapes and random weights, forward KL over the top
64, one packed row of sequences a step; weights float32, computed in bfloat16. Varied: shape, tokens
of the row, recomputed activations, kind of attention, compiled layers, adapters (LoRA). Random
weights change no product's time.

    tokens_per_s   tokens of the row over the time of forward and backward pass
    utilization    model FLOPs (trainer/utilization.py) in that time: a share of ``matmul_tflops``
    matmul_tflops  a product of two 8192 x 8192 bfloat16 matrices, measured in the same call
    peak_gib       most memory of torch's tensors in a step of two such rows: weights, moments and
                   gradients included
    planned_gib    what ``async_opd.memory.step`` plans for it
    syncs          operations of one pass in which the host waits for the device, as torch warns
    first_ms       the first pass, in which kernels are compiled
    apart          norm of the gradient's change by compiling, over its norm; ``eager_apart``: that
                   of a second eager pass; both of small students only
    check_s        the check of packed logits on the device (``trainer.student.check``), which
                   raises where they differ from the model's own

``parts`` is one pass under torch's profiler: milliseconds of kernels by what they compute, the
share of the time in which the device runs one, and the places of ``syncs``.
"""

from __future__ import annotations

import importlib
import inspect
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any

import torch

from async_opd.config.device_defaults import Recomputation
from async_opd.core.errors import StageError
from async_opd.memory.step import Step, peak
from async_opd.models.model_size import ModelSize
from async_opd.tools.qualify.measurements.measuring import (
    GIB,
    Figures,
    Report,
    Skip,
    finish,
    matmul_tflops,
    milliseconds,
)
from async_opd.tools.qualify.measurements.students import (
    TrainSettings,
    micro_batch,
    rank_of,
    student,
)
from trainer.batches.micro_batches import MicroBatch
from trainer.layers import recompute_activations
from trainer.rank import Rank
from trainer.student.adapters import add_adapters
from trainer.student.attention_choice import Attention, platform_of
from trainer.student.check import check_placed, check_student
from trainer.student.loading import in_bfloat16, set_attention

ATTENTION: tuple[Attention, ...] = ("varlen", "flash", "flex", "sdpa")
SIZES = {"cuda": ((4096, 16384, 32768), 4096), "cpu": ((64, 128), 64)}
"""Tokens of the rows, and of each sequence in them."""


@dataclass(frozen=True)
class Cell:
    """Varied settings. ``attention``: as ``train.attention``; by ``auto`` the trainer chooses."""

    shape: str
    tokens: int
    recompute: Recomputation
    sequence: int
    attention: Attention = "auto"
    compile: bool = False
    lora: bool = False

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
    varlen: Any = importlib.import_module("torch.nn.attention.varlen")
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


LORA: Any = SimpleNamespace(
    rank=32,
    alpha=64,
    use_rslora=False,
    sync="merged",
    targets="all-linear",
    adapted=lambda all_, _: all_,
)
"""The defaults of ``train.lora``, without pydantic."""


def built(cell: Cell, device: torch.device) -> Rank:
    """A rank with a new student."""
    model, settings = student(cell.shape, device), TrainSettings()
    attend(model, cell.attention, device)
    if cell.lora:
        settings = replace(settings, lora=LORA)
        add_adapters(model, LORA)
        model.to(device)
    if cell.recompute != "none":
        recompute_activations(model, cell.recompute)
    if cell.compile and "recompile_limit" not in inspect.signature(torch.compile).parameters:
        raise Skip("this torch's compile has no recompile_limit")
    return rank_of(model, device, train=replace(settings, compile=cell.compile))


def planned(cell: Cell, rank: Rank) -> float:
    """GiB of the step's peak, as the memory planner has it for the student's config."""
    config = rank.model.config
    named = [
        (n, tuple(p.shape), "F32")
        for n, p in student(cell.shape, torch.device("meta")).named_parameters()
    ]
    trained = sum(p.numel() for p in rank.model.parameters() if p.requires_grad)
    answered = sum(length - max(length // 8, 1) for length in cell.lengths)
    plan = Step(
        ModelSize.of(config.to_dict(), named),
        "cuda" if rank.device.type == "cuda" else "cpu",
        tokens=sum(cell.lengths),
        responses=answered,
        half=rank.student.half,
        recompute=cell.recompute,
        mask=config._attn_implementation in ("sdpa", "eager"),
        trained=trained if cell.lora else None,
    )
    return sum(peak(plan).values()) / GIB


def waits(work: Callable[[], object]) -> Counter[str]:
    """Places in our code, or else the last one, at which the host waits for the device."""
    found: Counter[str] = Counter()

    def noted(message: Any, *_: Any, **__: Any) -> None:
        if "synchroniz" in str(message):
            frames = [one for one in traceback.extract_stack() if "/qualify/" not in one.filename]
            own = [one for one in frames if "/trainer/" in one.filename] or frames
            found[f"{own[-1].filename.rpartition('/')[2]}:{own[-1].lineno}"] += 1

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = noted
        torch.cuda.set_sync_debug_mode("warn")
        try:
            work()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return found


KERNELS = {
    "attention": ("flash", "fmha", "flex", "varlen"),
    "products": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas"),
    "copies": ("memcpy", "memset"),
}
"""Words in the names of kernels, by what they compute; all others are elementwise, or sums."""


def parts(cell: Cell, device: torch.device) -> Figures:
    """One pass, after one that compiled and allocated."""
    from torch.profiler import ProfilerActivity, profile

    if device.type != "cuda":
        raise Skip("torch's profiler and its synchronizations are of a GPU")
    rank = built(cell, device)
    given = micro_batch(rank, cell.lengths)
    rank.backward([given])
    rank.apply(1e-5)
    places = waits(lambda: rank.backward([given]))
    rank.apply(1e-5)
    ms = milliseconds(device, lambda: rank.backward([given]), repeats=1, warm_up=0)
    rank.apply(1e-5)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        rank.backward([given])
        finish(device)
    autograd: Any = torch.autograd
    spent: Counter[str] = Counter()
    longest: Counter[str] = Counter()
    for event in profiled.events():
        if event.device_type == autograd.DeviceType.CUDA:
            name = event.name.lower()
            kinds = (kind for kind, words in KERNELS.items() if any(w in name for w in words))
            spent[next(kinds, "others")] += event.time_range.elapsed_us() / 1e3
            longest[event.name[:60]] += event.time_range.elapsed_us() / 1e3
    found: Figures = {f"{kind}_ms": spent[kind] for kind in (*KERNELS, "others")}
    found |= {"ms": ms, "busy": sum(spent.values()) / ms, "syncs": sum(places.values())}
    found["waits"] = ", ".join(f"{place} x{count}" for place, count in places.most_common(12))
    found["longest"] = ", ".join(f"{name} {each:.2f}" for name, each in longest.most_common(8))
    return found


def step(cell: Cell, device: torch.device, matmul: float) -> Figures:
    """Figures of one cell; ``matmul``: TFLOP/s."""
    rank = built(cell, device)
    given = micro_batch(rank, cell.lengths)

    def backward() -> None:
        rank.backward([given])
        rank.optimizer.zero_grad(set_to_none=True)

    started = time.perf_counter()
    rank.backward([given])
    finish(device)
    first_ms = 1e3 * (time.perf_counter() - started)
    started = time.perf_counter()
    rank.apply(1e-5)  # AdamW allocates its moments here
    finish(device)
    ms = milliseconds(device, backward, repeats=3, warm_up=1)
    rank.backward([given])
    apply_ms = milliseconds(device, rank.optimizer.step, repeats=3, warm_up=1)
    rank.apply(None)
    rank.backward([given, given])
    used = rank.apply(None)
    answered = [len(sample.rollout.response_ids) for sample in given.samples]
    tflops = rank.size.training_flops(cell.lengths, answered) / ms / 1e9
    return {
        "attends": rank.model.config._attn_implementation,
        "tokens_per_s": sum(cell.lengths) / ms * 1e3,
        "tflops": tflops,
        "utilization": tflops / matmul,
        "backward_ms": ms,
        "apply_ms": apply_ms,
        "first_ms": first_ms,
        "peak_gib": None if used is None else used.peak / GIB,
        "planned_gib": planned(cell, rank),
        "peak_ratio": None if used is None else used.peak / GIB / planned(cell, rank),
        **(against_eager(rank, given) if rank.student.layers else {}),
    }


def against_eager(rank: Rank, given: MicroBatch) -> Figures:
    """How far compiled layers change the gradient, beside what a second eager pass changes."""
    assert rank.student.layers is not None
    if sum(parameter.numel() for parameter in rank.model.parameters()) > SMALL:
        return {"compiled": rank.student.layers.is_compiled}

    def gradient() -> torch.Tensor:
        rank.backward([given])
        found = [p.grad.flatten() for p in rank.model.parameters() if p.grad is not None]
        parts = torch.cat(found)
        rank.apply(None)
        return parts

    compiled = gradient()
    was = rank.student.layers.is_compiled
    with rank.student.layers.paused():
        eager, again = gradient(), gradient()
    norm = eager.norm()
    return {
        "compiled": was,
        "apart": float((compiled - eager).norm() / norm),
        "eager_apart": float((again - eager).norm() / norm),
    }


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
        check_placed(rank.student, exact)
        return {"check_s": time.perf_counter() - started}


SMALL = 1_000_000_000
"""Weights of a student of whose gradient three copies fit the device."""
RECOMPUTATIONS: tuple[Recomputation, ...] = ("full", "selective", "none")


def cells(device: torch.device, shapes: list[str], tokens: tuple[int, ...]) -> Iterator[Cell]:
    """Recomputation by shape at the middle size, also compiled; then what else may differ."""
    sequence = SIZES[device.type][1]
    small, large = shapes[0], shapes[-1]
    middle = tokens[len(tokens) // 2]
    compiles = device.type == "cuda"  # a CPU's compiler takes a minute for each
    for recompute in RECOMPUTATIONS:
        yield Cell(small, middle, recompute, sequence)
    if compiles:
        yield Cell(small, middle, "none", sequence, compile=True)
    yield Cell(large, middle, "full", sequence)
    if compiles:
        yield Cell(large, middle, "full", sequence, compile=True)
        yield Cell(large, middle, "selective", sequence, compile=True)
    yield Cell(large, middle, "selective", sequence)
    yield Cell(large, middle, "full", sequence, lora=True)
    for attention in ATTENTION[1:]:
        yield Cell(small, middle, "none", sequence, attention)
        if attention != "sdpa":
            yield Cell(small, middle, "selective", sequence, attention)
            if compiles:
                yield Cell(small, middle, "full", sequence, attention, compile=True)
    yield Cell(small, tokens[-1], "full", tokens[-1])  # one long sequence
    for count in (tokens[0], tokens[-1]):
        yield Cell(small, count, "none", sequence)
    if compiles:
        for recompute in ("full", "selective"):
            yield Cell(small, middle, recompute, sequence, compile=True)


def kind_of(cell: Cell) -> str:
    """The row that has the cell."""
    return "flash" if cell.attention == "flash" else "compiled" if cell.compile else ""


def main(report: Report, kind: str = "") -> None:
    """The cells of one kind: ``compiled``, ``flash``, or all others."""
    device = report.device
    shapes = ["qwen3-0.6b", "qwen3-4b"] if device.type == "cuda" else ["tiny"]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    matmul = matmul_tflops(device, dtype)
    if not kind:
        report.cell(lambda: {"matmul_tflops": matmul}, what="peak", dtype=str(dtype))
    check = Checked(shapes[0], device)
    for attention in ATTENTION:
        if kind == ("flash" if attention == "flash" else ""):
            work = partial(check.measure, attention)
            report.cell(work, what="check", shape=shapes[0], attention=attention)
    del check
    tokens, sequence = SIZES[device.type]
    middle = tokens[len(tokens) // 2]
    for shape in shapes if not kind else ():
        one = Cell(shape, middle, "full", sequence)
        report.cell(partial(parts, one, device), what="parts", **vars(one))
    for one in cells(device, shapes, tokens):
        if kind_of(one) != kind:
            continue
        report.cell(partial(step, one, device, matmul), what="step", **vars(one))
        if one.compile and one.recompute == "none":
            report.cell(partial(parts, one, device), what="parts", **vars(one))
