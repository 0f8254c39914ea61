"""The rows of ``async_opd qualify``: meaning, needs and criterion of each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from async_opd.config.precision import SCHEMES

Cell = dict[str, Any]
REASONS = ("skipped", "not_reached", "out_of_memory", "failed")
"""The keys under which a cell without figures says why it has none. ``not_reached``: the row's time
was over."""


@dataclass(frozen=True)
class Bound:
    """The limits of a figure, which every measured cell with the values ``of`` must have.

    ``gpu``: it is not for the small sizes of a CPU.
    """

    figure: str
    most: float = math.inf
    least: float = -math.inf
    of: tuple[tuple[str, Any], ...] = ()
    gpu: bool = False

    def __str__(self) -> str:
        limits = [f"at least {self.least:g}"] * (self.least > -math.inf)
        limits += [f"at most {self.most:g}"] * (self.most < math.inf)
        where = ", ".join(f"{key} {value}" for key, value in self.of)
        return f"{self.figure} {' and '.join(limits)}" + (f" ({where})" if where else "")

    def broken(self, cells: Sequence[Cell]) -> list[str]:
        """A line for each cell beyond the limits or without the figure; one if there is no cell."""
        own = [cell for cell in cells if all(cell.get(key) == value for key, value in self.of)]
        measured = [cell for cell in own if not reason(cell)]
        if not measured and not any("not_reached" in cell for cell in own):
            return [f"{self}: no cell has this figure"]
        lacking = [cell for cell in measured if self.figure not in cell]
        found = [cell[self.figure] for cell in measured if self.figure in cell]
        return [
            *(f"{self}: not in the cell {named(cell)}" for cell in lacking),
            *(f"{self}: {one:g}" for one in found if not self.least <= one <= self.most),
        ]


@dataclass(frozen=True)
class GpuRow:
    """One row. ``module``: of ``measurements``; its ``main`` gets ``given`` after the report.

    ``minutes``: the most that it may take. ``gpus``: how many it needs; with ``cpu`` it runs on a
    machine without any, at a small size. ``packages``: those beside torch and transformers.
    ``may_exhaust``: it passes although some cells need more memory than the GPU has.
    """

    shows: str
    module: str
    minutes: float
    bounds: tuple[Bound, ...]
    gpus: int = 1
    cpu: bool = True
    packages: tuple[str, ...] = ()
    given: tuple[str, ...] = ()
    may_exhaust: bool = False

    def needs(self) -> str:
        """GPUs and packages, in words."""
        gpus = f"{self.gpus} GPU{'s' * (self.gpus > 1)}" + " or a CPU" * self.cpu
        return ", ".join([gpus, "torch", "transformers", *self.packages])

    def criterion(self) -> str:
        """When the row has passed, in words."""
        memory = "" if self.may_exhaust else " or ran out of memory"
        return "; ".join([f"no cell failed{memory}", *map(str, self.bounds)])

    def broken(self, cells: Sequence[Cell], device: str) -> list[str]:
        """Why the row has not passed with these cells; empty if it has."""
        fatal = ("failed",) if self.may_exhaust else ("failed", "out_of_memory")
        failed = [f"{named(cell)}: {cell[key]}" for cell in cells for key in fatal if key in cell]
        bounds = [bound for bound in self.bounds if device == "cuda" or not bound.gpu]
        return failed + [line for bound in bounds for line in bound.broken(cells)]


def named(cell: Cell) -> str:
    """The cell by its values."""
    return ", ".join(f"{key} {value}" for key, value in cell.items() if key not in REASONS)


def reason(cell: Cell) -> str:
    """Why a cell has no figures; empty if it has some."""
    found = (f"{key.replace('_', ' ')}: {cell[key]}" for key in REASONS if key in cell)
    return "; ".join(found)


ENGINES = ("ray", "vllm", "pydantic")
RUN_BOUNDS = (
    Bound("steps", least=6),
    Bound("wrong_weights", 0),
    Bound("freshness_share", 1),
    Bound("mismatch_error", 1.05),
)
"""Of every run: all its steps, each weight sync proven fresh, engines that compute as the trainer.
"""
MESH = (("what", "mesh"),)
MESH_BOUNDS = (
    Bound("difference", 0.5, of=MESH),
    Bound("norm_ratio", 1.05, 0.95, of=MESH),
    Bound("communicator_gib", 0.5, of=MESH, gpu=True),
)
SYNC_BOUNDS = (
    Bound("wrong", 0, of=(("what", "sync"),)),
    Bound("ends_s", 30, of=(("what", "dies"),)),
)
STEP_BOUNDS = (
    Bound("peak_ratio", 1.1, 0.9, of=(("what", "step"),), gpu=True),
    Bound("check_s", 120, of=(("what", "check"),)),
)

ROWS = {
    "streams": GpuRow(
        "wrong tensors between training steps and weight syncs: with a pool of threads and without "
        "an event between snapshot and sender (two planted faults), and with one thread for each "
        "and an event",
        "streams",
        1.5,
        (
            Bound("wrong_trained", 0, of=(("threads", "own"), ("event", "waits"))),
            Bound("wrong_received", 0, of=(("threads", "own"), ("event", "waits"))),
            Bound("wrong_received", least=1, of=(("event", "none"),), gpu=True),
        ),
    ),
    "nccl": GpuRow(
        "weight syncs over NCCL to another GPU by vLLM's communicator: digests at the receiver, "
        "time, and the abort when the receiver was killed",
        "weights",
        4,
        SYNC_BOUNDS,
        gpus=2,
        cpu=False,
        packages=("vllm",),
        given=("nccl",),
    ),
    "engines": GpuRow(
        "a run of the quickstart with all pools on one GPU, which sleep in turn, and without CUDA"
        " graphs: every sync proven fresh; the distance and the mismatch of vLLM's kernels",
        "runs",
        6,
        RUN_BOUNDS,
        gpus=1,
        cpu=False,
        packages=ENGINES,
        given=(
            "one GPU",
            "no CUDA graphs",
        ),
    ),
    "sleep": GpuRow(
        "GPU memory of an engine that sleeps, beside the planner's bound, and its answers "
        "afterwards",
        "engines",
        4,
        (Bound("same_first", least=0.95), Bound("asleep_gib", 2, gpu=True)),
        packages=ENGINES,
        given=("sleep",),
    ),
    "parallel_sleep": GpuRow(
        "the same of an engine of two workers (tensor parallel)",
        "engines",
        4,
        (Bound("same_first", least=0.95), Bound("asleep_gib", 2.5, gpu=True)),
        gpus=2,
        cpu=False,
        packages=ENGINES,
        given=("parallel",),
    ),
    "run_nccl": GpuRow(
        "a run whose weights travel over NCCL: every sync proven fresh",
        "runs",
        4,
        RUN_BOUNDS,
        gpus=2,
        cpu=False,
        packages=ENGINES,
        given=("nccl",),
    ),
    "run_shared_memory": GpuRow(
        "a run whose weights travel through shared memory to another GPU",
        "runs",
        4,
        RUN_BOUNDS,
        gpus=2,
        cpu=True,
        packages=ENGINES,
        given=("shared memory",),
    ),
    "ranks": GpuRow(
        "a student sharded with FSDP2 over two ranks, against one rank: gradients reduced once a "
        "step and each micro-batch, state in host memory (gloo and NCCL in one group); time, and "
        "the bytes of a communicator",
        "fsdp",
        4,
        MESH_BOUNDS,
        gpus=2,
        given=(
            "reduced once a step",
            "reduced each micro-batch",
            "moments in host memory",
            "parameters in host memory",
        ),
    ),
    "context": GpuRow(
        "two ranks that share every row, against one rank: attention of some heads of all tokens,"
        " exchanged between the ranks",
        "fsdp",
        2,
        MESH_BOUNDS,
        gpus=2,
        given=("rows shared",),
    ),
    "tensor_parallel": GpuRow(
        "a run with engines of two workers",
        "runs",
        5,
        RUN_BOUNDS,
        gpus=3,
        cpu=False,
        packages=ENGINES,
        given=("tensor parallel",),
    ),
    "quantized": GpuRow(
        "a run for each scheme by which engines quantize weights online, on a GPU that has its "
        "kernel: the mismatch (weights are proven fresh for fp8_per_channel alone)",
        "runs",
        9.5,
        (Bound("steps", least=6), Bound("mismatch_error", 1.25)),
        gpus=2,
        cpu=False,
        packages=ENGINES,
        given=tuple(f"quantized: {name}" for name in SCHEMES),
    ),
    "adapters": GpuRow(
        "a run whose engines apply the adapters of LoRA, with CUDA graphs",
        "runs",
        5,
        RUN_BOUNDS,
        gpus=2,
        cpu=False,
        packages=(*ENGINES, "peft"),
        given=("adapters",),
    ),
    "parallel_adapters": GpuRow(
        "the same with engines of two workers",
        "runs",
        5,
        RUN_BOUNDS,
        gpus=3,
        cpu=False,
        packages=(*ENGINES, "peft"),
        given=("adapters, tensor parallel",),
    ),
    "routing": GpuRow(
        "a run of a small mixture whose trainer replays the experts that the engine chose",
        "runs",
        5,
        RUN_BOUNDS,
        gpus=2,
        cpu=False,
        packages=ENGINES,
        given=("routing",),
    ),
    "compiled": GpuRow(
        "training steps with compiled decoder layers, by recomputation: the gradient beside that "
        "of eager layers, time, memory",
        "rank",
        6,
        (
            Bound("compiled", least=1, of=(("what", "step"),)),
            Bound("apart", 0.05, of=(("what", "step"), ("shape", "qwen3-0.6b"))),
        ),
        cpu=False,
        given=("compiled",),
        may_exhaust=True,
    ),
    "families": GpuRow(
        "packed rows of tiny students of 22 families, by kind of attention (flash-attn and flex "
        "with soft caps among them): the trainer's check of packed logits, and the gradient's "
        "norm against that of a CPU",
        "families",
        3,
        (Bound("norm_ratio", 1.1, 0.9),),
    ),
    "weights": GpuRow(
        "whole weight syncs to another process on the same GPU, over gloo and through shared "
        "memory: time of copies from memory that is not pinned, and digests at the receiver",
        "weights",
        3,
        SYNC_BOUNDS,
    ),
    "noise": GpuRow(
        "the freshness proof's held rows: the trainer's log-probabilities against the same "
        "weights in bfloat16, and against stale and wrong ones",
        "noise",
        1.5,
        (
            Bound("share", 1, of=(("weights", "the trainer's, later sync"),)),
            Bound("share", least=1, of=(("weights", "one layer wrong"),)),
        ),
    ),
    "rank": GpuRow(
        "training steps with the shapes of Qwen3-0.6B and 4B, 4 k to 32 k tokens a row, by "
        "recomputation, attention, compiled layers and LoRA: tokens/s, utilization against a "
        "product of matrices, memory beside the planner's; where the time of a pass goes",
        "rank",
        8,
        STEP_BOUNDS,
        may_exhaust=True,
    ),
    "flash": GpuRow(
        "training steps with flash-attn, also with selective recomputation: the check of packed "
        "logits, time, memory beside the planner's",
        "rank",
        1.5,
        STEP_BOUNDS,
        cpu=False,
        packages=("flash_attn",),
        given=("flash",),
        may_exhaust=True,
    ),
    "state": GpuRow(
        "weights and moments moved to pinned host memory and back, captured for a checkpoint, "
        "read again; weights read straight to the GPU, and their speed; moments in host memory "
        "and in fewer bits; digests; the same pass twice",
        "state",
        3,
        tuple(
            Bound("wrong", 0, of=(("what", kind),))
            for kind in ("checkpoint", "offloaded", "digests", "stored")
        ),
    ),
    "fsdp": GpuRow(
        "a student sharded with FSDP2 on a mesh of one over NCCL, against no mesh",
        "fsdp",
        1.5,
        MESH_BOUNDS,
    ),
    "defaults": GpuRow(
        "tokens/s of an engine as async_opd configures it, beside other sizes of engine steps and"
        " without CUDA graphs",
        "engines",
        9,
        (Bound("share_of_best", least=0.9, of=(("what", "share"),), gpu=True),),
        packages=ENGINES,
        given=("speed",),
    ),
    "losses": GpuRow(
        "the chunked loss at hidden 2560 and 5120: time over that of its products alone, memory, "
        "error against float64, compiled against eager",
        "losses",
        2.5,
        (
            Bound("ours_loss", 1e-6, of=(("dtype", "float32"),)),
            Bound("ours_hidden", 1e-4, of=(("dtype", "float32"),)),
            Bound("ours_weight", 1e-4, of=(("dtype", "float32"),)),
            Bound("ours_loss", 1e-3, of=(("dtype", "bfloat16"),)),
            Bound("ours_hidden", 0.02, of=(("dtype", "bfloat16"),)),
            Bound("ours_weight", 0.02, of=(("dtype", "bfloat16"),)),
            Bound("floor_ratio", 2.5, of=(("what", "speed"),), gpu=True),
        ),
    ),
    "scoring": GpuRow(
        "log-probabilities of rows at hidden 5120 and 151,936 columns: error in nats and time, by"
        " precision of head and logits",
        "scoring",
        1,
        (Bound("worst_nats", 1e-3, of=(("head", "float32_head"),)),),
    ),
    "snapshot": GpuRow(
        "copying a student's weights out: pinned, pageable and device memory; the bytes that "
        "torch pins and those of a CUDA context, beside the planner's bounds",
        "snapshot",
        1,
        (
            Bound("gb_per_s", least=10, of=(("way", "pinned, made once"),), gpu=True),
            Bound("pinned_ratio", 2, 1, of=(("of", "pinned"),), gpu=True),
            Bound("context_gib", 1, of=(("of", "context"),), gpu=True),
        ),
    ),
    "cluster": GpuRow(
        "a run in an existing cluster (RAY_ADDRESS), each pool on other GPUs",
        "runs",
        5,
        RUN_BOUNDS,
        gpus=1,
        cpu=True,
        packages=ENGINES,
        given=("cluster",),
    ),
}
"""By name, the riskiest first."""
