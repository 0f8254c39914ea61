"""Short runs of the quickstart by ``async_opd.distil``, one for each cell, on this machine.

Models and data come along in the wheel; a mixture of experts is made on the spot. The engines, the
trainer and the weight syncs are those of any run; every sync is proven fresh.

    steps             steps that were trained
    wrong_weights     replicas that were found with wrong weights
    freshness_share   largest distance of an engine's held rows from the trainer's, over its limit
    mismatch_error    multiplicative error of a probability between engine and trainer, the mean
                      over tokens, of the step with the largest
    sync_s            seconds of a weight sync, median; ``transfer_s``: of its transfer
    tokens_per_s      tokens that the trainer trained: the most of all steps
"""

from __future__ import annotations

import math
import os
import shutil
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from async_opd.api import Callback, distil
from async_opd.config.precision import SCHEMES
from async_opd.core.errors import ConfigError
from async_opd.tools.first_steps.command import CONFIG, packaged
from async_opd.tools.qualify.measurements.measuring import (
    Figures,
    Report,
    Skip,
    without_trainers_allocator,
)

STEPS = 6
SHORT = (
    f"train.steps={STEPS}",
    "train.batch_size=16",
    "train.warmup_steps=0",
    "train.compile=false",
    "async.sync_steps=1",
    "sync.verify_every=1",
    "eval.max_prompts=4",
    "log.wandb=off",
)
TEACHER = "teachers={{sort: {{model: quickstart/models/teacher-sort, sources: [sort, reverse]{}}}}}"
GUEST = TEACHER.format(", placement: colocated, with: rollout")
LONE_GPU = ("rollout.placement=colocated", "rollout.with=train", GUEST)
"""All pools on the same GPU, which they take in turns: engines sleep meanwhile."""
RUNS: dict[str, tuple[str, ...]] = {
    "one GPU": LONE_GPU,
    "no CUDA graphs": (*LONE_GPU, "rollout.engine.extra.enforce_eager=true"),
    "nccl": (GUEST, "sync.backend=nccl"),
    "shared memory": (GUEST, "sync.backend=shared_memory"),
    "tensor parallel": (GUEST, "rollout.tensor_parallel=2"),
    "adapters": (GUEST, "train.lora={rank: 16, alpha: 32, sync: adapter}"),
    "adapters, tensor parallel": (
        GUEST,
        "train.lora={rank: 16, alpha: 32, sync: adapter}",
        "rollout.tensor_parallel=2",
    ),
    "routing": (GUEST, "train.routing=replay", "student.model={mixture}"),
    "cluster": (TEACHER.format(""), "cluster.address=auto"),
    **{
        f"quantized: {name}": (
            GUEST,
            f"rollout.engine.quantization={name}",
            f"sync.verify_every={int(name == 'fp8_per_channel')}",  # no proof of the others yet
            *(["student.model={mixture}"] * scheme.experts),
        )
        for name, scheme in SCHEMES.items()
    },
}
"""Overrides of the quickstart's config, by the names of cells."""


class KeptMetrics(Callback):
    """The rows of a run's metrics."""

    def __init__(self) -> None:
        self.rows: list[Mapping[str, float]] = []

    def on_row(self, step: int, metrics: Mapping[str, float]) -> None:
        """Keeps the row."""
        self.rows.append(metrics)

    def values(self, name: str) -> list[float]:
        """Of a metric, in the rows that have it."""
        return [row[name] for row in self.rows if name in row]

    def most(self, name: str) -> float | None:
        """The largest value of a metric; None without any."""
        return largest(self.values(name))

    def median(self, name: str) -> float | None:
        """The median of a metric; None without any."""
        found = self.values(name)
        return statistics.median(found) if found else None


def largest(values: Sequence[float]) -> float | None:
    """The largest value, nan if one is nan; None without any."""
    if any(math.isnan(value) for value in values):
        return math.nan
    return max(values, default=None)


def shares(values: Sequence[float], limits: Sequence[float]) -> list[float]:
    """Of each limit; beyond a limit of 0 a share is infinite."""
    pairs = zip(values, limits, strict=True)
    return [one / most if most else math.inf if one else 0.0 for one, most in pairs]


def mixture(folder: Path, student: Path) -> str:
    """A random mixture of four experts, with the tokens of the quickstart's student."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    shutil.copytree(student, folder)
    (folder / "model.safetensors").unlink()
    torch.manual_seed(0)
    own = Qwen3MoeConfig.from_pretrained(student)
    own.update({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64})
    own.architectures = None
    Qwen3MoeForCausalLM(own).save_pretrained(folder)
    return str(folder)


def run(name: str, device: torch.device) -> Figures:
    """One run. RuntimeError if it did not complete.

    Skip without a cluster to join, and where the config refuses a scheme of quantization, of which
    this GPU may lack the kernel.
    """
    if name == "cluster" and not os.environ.get("RAY_ADDRESS"):
        raise Skip("RAY_ADDRESS names no cluster of several machines to join")
    kept, config = KeptMetrics(), packaged() / CONFIG
    with tempfile.TemporaryDirectory() as folder:
        student = config.parent / "quickstart" / "models" / "student"
        given = RUNS[name]
        if any("{mixture}" in one for one in given):
            made = mixture(Path(folder) / "mixture", student)
            given = tuple(one.replace("{mixture}", made) for one in given)
        overrides = [*SHORT, f"run_dir={folder}/run", *given]
        if name != "cluster":  # whose machines may have GPUs where this one has none
            overrides.append(f"cluster.device={device.type}")
        try:
            summary = distil(config, callbacks=[kept], overrides=overrides)
        except ConfigError as error:
            if not name.startswith("quantized: "):
                raise
            raise Skip(str(error)) from error
    if summary.status != "completed":
        raise RuntimeError(f"the run ended as {summary.status}: {summary.error}")
    far, limit = kept.values("sync/freshness_nats"), kept.values("sync/freshness_limit_nats")
    return {
        "steps": summary.steps,
        "wrong_weights": kept.most("sync/wrong_weights"),
        "freshness_share": largest(shares(far, limit)),
        "mismatch_error": kept.most("mismatch/error"),
        "sync_s": kept.median("sync/seconds"),
        "transfer_s": kept.median("sync/transfer_s"),
        "tokens_per_s": kept.most("train/tokens_per_s"),
        "gpu_memory_outside_gib": kept.most("train/gpu_memory_outside_gib"),
    }


def main(report: Report, *names: str) -> None:
    """The RUNS of these names."""
    without_trainers_allocator(report.device)
    for name in names:
        report.cell(partial(run, name, report.device), what="run", run=name)
