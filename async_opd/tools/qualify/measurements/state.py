"""A rank's state on the move: between GPU, host memory and disk, and a step computed twice.

offloaded      ``Rank.offload`` and ``onload``: weights and moments to pinned host memory and back
host_moments   ``Rank.apply`` with moments in host memory, and on the device
checkpoint     ``RankState.capture``, ``write`` and ``load``; then a step from the checkpoint gives
               the bits that it gave before, with CUDA's random state
stored         weights read from safetensors files straight to the device, and to the host
digests        ``weight_sync.digests`` of all weights, on the device and on the host: equal
twice          the same backward pass twice: tensors whose gradients differ in any bit
low_bit        AdamW with bfloat16 and 8-bit moments, compiled for the device

gb_per_s       bytes moved over seconds, in 10^9 bytes; ``freed_gib`` of the device by offloading
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from async_opd.tools.qualify.measurements.measuring import (
    GIB,
    Figures,
    Report,
    finish,
    milliseconds,
)
from async_opd.tools.qualify.measurements.students import (
    TrainSettings,
    micro_batch,
    rank_of,
    student,
)
from async_opd.weight_sync.digests import Digests
from trainer.batches.micro_batches import MicroBatch
from trainer.rank import Rank
from trainer.saving.shards import Stamp
from trainer.saving.state import training_state
from trainer.student.stored_weights import StoredWeights

SIZES = {"cuda": ("qwen3-0.6b", 4096), "cpu": ("tiny", 64)}
RATE = 1e-4
Digest = dict[str, str]


def trained_rank(device: torch.device, **settings: Any) -> tuple[Rank, list[MicroBatch]]:
    """A rank after one step, which made its moments, and the micro-batch of that step."""
    shape, tokens = SIZES[device.type]
    rank = rank_of(student(shape, device), device, train=replace(TrainSettings(), **settings))
    given = [micro_batch(rank, [tokens])]
    rank.backward(given)
    rank.apply(RATE)
    return rank, given


def seconds(device: torch.device, work: Callable[[], object]) -> float:
    """From an idle device to an idle device."""
    finish(device)
    started = time.perf_counter()
    work()
    finish(device)
    return time.perf_counter() - started


def digests_of(named: Any) -> Digest:
    """Of tensors by name, equal for equal bits."""
    found = Digests(torch)
    for name, tensor in named:
        found.add(name, tensor)
    return found.values()


def weights(rank: Rank) -> Digest:
    return digests_of(rank.model.named_parameters())


def different(one: Digest, other: Digest) -> int:
    """Tensors whose bits differ."""
    return sum(one[name] != other[name] for name in one)


def offloaded(device: torch.device) -> Figures:
    """Out, back, out again: the first time pins the memory."""
    rank, given = trained_rank(device)
    gpu = device.type == "cuda"
    before, held = weights(rank), torch.cuda.memory_allocated(device) if gpu else 0
    first = seconds(device, rank.offload)
    freed = held - torch.cuda.memory_allocated(device) if gpu else 0
    back = seconds(device, rank.onload)
    again = seconds(device, rank.offload)
    rank.onload()
    wrong = different(before, weights(rank))
    rank.backward(given)
    rank.apply(RATE)  # the optimizer has its moments where its weights are
    nbytes = 12 * sum(parameter.numel() for parameter in rank.model.parameters()) / 1e9
    return {
        "out_first_gb_per_s": nbytes / first,
        "out_gb_per_s": nbytes / again,
        "back_gb_per_s": nbytes / back,
        "freed_gib": freed / GIB,
        "wrong": wrong,
    }


def host_moments(device: torch.device, offload: str) -> Figures:
    """The optimizer's step, and the device's memory between two steps."""
    rank, given = trained_rank(device, offload=offload)
    rank.backward(given)
    ms = milliseconds(device, rank.optimizer.step, repeats=3, warm_up=1)
    rank.apply(None)
    held = torch.cuda.memory_allocated(device) / GIB if device.type == "cuda" else None
    return {"step_ms": ms, "held_gib": held}


def state_of(rank: Rank) -> Digest:
    """Of weights and moments."""
    return digests_of(training_state(rank.model, rank.optimizer))


def checkpoint(device: torch.device) -> Figures:
    """Of the state before a step, read after it. Capturing again finds its memory there."""
    rank, given = trained_rank(device)
    stamp = Stamp(1, 1, 1, "id")
    with tempfile.TemporaryDirectory() as folder:
        first = seconds(device, lambda: rank.state.capture(stamp))
        captured = seconds(device, lambda: rank.state.capture(stamp))
        written = seconds(device, lambda: rank.write(folder))
        before = state_of(rank)
        drawn = torch.rand(1, device=device).item()
        rank.backward(given)
        rank.apply(RATE)
        read = seconds(device, lambda: rank.state.load(folder))
        nbytes = sum(file.stat().st_size for file in Path(folder).iterdir()) / 1e9
    return {
        "capture_first_gb_per_s": nbytes / first,
        "capture_gb_per_s": nbytes / captured,
        "write_gb_per_s": nbytes / written,
        "read_gb_per_s": nbytes / read,
        "wrong": different(before, state_of(rank)),
        "same_random_state": drawn == torch.rand(1, device=device).item(),
    }


def stored(device: torch.device, home: torch.device) -> Figures:
    """Float32 files that the page cache holds, read to the home of the parameters."""
    from transformers import AutoModelForCausalLM

    model = student(SIZES[device.type][0], device).cpu()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        nbytes = sum(file.stat().st_size for file in Path(folder).glob("*.safetensors")) / 1e9
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(model.config)
        files = StoredWeights(empty, Path(folder))
        spent = seconds(device, lambda: files.fill(device, home))
    wrong = different(digests_of(model.named_parameters()), digests_of(empty.named_parameters()))
    return {"read_gb_per_s": nbytes / spent, "wrong": wrong}


def digested(device: torch.device) -> Figures:
    """Of the weights as engines get them."""
    rank, _ = trained_rank(device)
    named = list(rank.weights.sent())
    nbytes = sum(tensor.nbytes for _, tensor in named) / 1e9
    ms = milliseconds(device, lambda: digests_of(named), repeats=3, warm_up=1)
    copies = [(name, tensor.cpu()) for name, tensor in named]
    started = time.perf_counter()
    on_host = digests_of(copies)
    host = time.perf_counter() - started
    found = {"gb_per_s": 1e3 * nbytes / ms, "host_gb_per_s": nbytes / host}
    return {**found, "tensors": len(named), "wrong": different(digests_of(named), on_host)}


def twice(device: torch.device, deterministic: bool) -> Figures:
    """``deterministic``: under torch.use_deterministic_algorithms, where it raises nothing."""
    rank, given = trained_rank(device)
    found, spent = [], []
    torch.use_deterministic_algorithms(deterministic)
    try:
        for _ in range(2):
            spent.append(seconds(device, lambda: rank.backward(given)))
            grads = ((n, p.grad) for n, p in rank.model.named_parameters())
            found.append(digests_of(grads))
            rank.apply(None)
    finally:
        torch.use_deterministic_algorithms(False)
    return {"ms": 1e3 * min(spent), "different": different(*found), "tensors": len(found[0])}


def low_bit(device: torch.device, moments: str) -> Figures:
    """The optimizer's step; the first one compiles."""
    started = time.perf_counter()
    rank, given = trained_rank(device, moments=moments)
    finish(device)
    first = time.perf_counter() - started
    rank.backward(given)
    ms = milliseconds(device, rank.optimizer.step, repeats=3, warm_up=1)
    state = rank.optimizer.state.values()
    nbytes = sum(t.nbytes for one in state for t in one.values() if isinstance(t, torch.Tensor))
    return {"step_ms": ms, "first_s": first, "moments_gib": nbytes / GIB}


def main(report: Report) -> None:
    """See the module."""
    device = report.device
    shape = SIZES[device.type][0]
    report.cell(partial(twice, device, False), what="twice", shape=shape, deterministic=False)
    report.cell(partial(checkpoint, device), what="checkpoint", shape=shape)
    report.cell(partial(offloaded, device), what="offloaded", shape=shape)
    for offload in ("none", "moments"):
        work = partial(host_moments, device, offload)
        report.cell(work, what="host_moments", shape=shape, offload=offload)
    report.cell(partial(digested, device), what="digests", shape=shape)
    for home in dict.fromkeys((device, torch.device("cpu"))):
        report.cell(partial(stored, device, home), what="stored", shape=shape, home=home.type)
    compiled = ("bfloat16", "8bit") if device.type == "cuda" else ()  # slow on a CPU
    for moments in ("float32", *compiled):
        work = partial(low_bit, device, moments)
        report.cell(work, what="low_bit", shape=shape, moments=moments)
    report.cell(partial(twice, device, True), what="twice", shape=shape, deterministic=True)
