"""The pools of a run as ``doctor --engines`` starts them: how fresh their weights are.

first sync ──► responses of the student ──one update──► second sync ──► findings of both
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from async_opd.accounting.images import kept
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import SelfTeacher
from async_opd.core.batch import Batch
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.data.answers import supervised
from async_opd.tools.doctor.finding import Finding
from async_opd.tools.engines import ToolEngines
from async_opd.waiting.deadline import Deadline, endless, race
from async_opd.weight_sync.layout import Kind

if TYPE_CHECKING:
    from async_opd.cluster.launch import LaunchedStages
    from async_opd.weight_sync.layout import WeightMeta

TOPIC = "engines"
RESPONSE_TOKENS = 64
DTYPES = "give rollout.engine and teachers.*.engine the same dtype and head_dtype as the trainer"
BOUND = "four times the rounding that the first weight sync measured"
FRESHNESS: dict[Kind, tuple[str, str, str]] = {
    "text": ("held rows", "sync/freshness_nats", "sync/freshness_limit_nats"),
    "image": (
        "the held row with an image",
        "sync/freshness_image_nats",
        "sync/freshness_image_limit_nats",
    ),
}
"""Held rows of each kind, and the metrics of their distance and of its bound."""


@dataclass(frozen=True)
class Measured:
    """The student's responses under its first weights, and what its syncs proved.

    ``responses`` were sampled at temperature 1. ``first`` and ``update`` are the metrics of the
    first sync and of that of one changed version; ``meta`` is the first one's.
    """

    responses: list[Rollout]
    meta: WeightMeta
    first: Mapping[str, float]
    update: Mapping[str, float]

    def bound(self, kind: Kind) -> float:
        """The largest distance in nats that rounding explains; 0 if no such rows were compared."""
        return self.first.get(FRESHNESS[kind][2], 0.0)


def measuring(config: RunConfig, folder: Path) -> RunConfig:
    """The config with every sync proven, and teachers alone that score sampled tokens."""
    proven = {"verify_every": 1, "on_wrong_weights": "stop", "fake_quantization": None}
    sync = config.sync.model_copy(update=proven)
    teachers = {
        name: teacher.model_copy(update={"refresh_every": 0})
        if isinstance(teacher, SelfTeacher)
        else teacher
        for name, teacher in config.teachers.items()
    }
    parts = {"sync": sync, "teachers": teachers, "run_dir": str(folder)}
    return config.model_copy(update=parts)


async def measure(config: RunConfig, engines: ToolEngines, prompts: Sequence[Prompt]) -> Measured:
    """Starts all pools, as the run does, and measures them. StageError.

    ``prompts`` have the bytes of their images.
    """
    from async_opd.cluster.launch import launch

    async with launch(config, device=engines.device, eos_ids=engines.eos_ids) as stages:
        work = _measure(config, stages, prompts)
        bounded = Deadline("doctor").within(
            config.timeouts.stall_s, "measuring the pools", work, "raise timeouts.stall_s"
        )
        return await race(
            bounded, endless("rollouter", stages.rollouter.run(), "during the examination")
        )


async def _measure(
    config: RunConfig, stages: LaunchedStages, prompts: Sequence[Prompt]
) -> Measured:
    meta = await stages.rollouter.snapshot(0)
    first = await stages.rollouter.push()
    tokens = min(RESPONSE_TOKENS, config.rollout.max_tokens)
    asked = SamplingSpec(max_tokens=tokens, temperature=1.0, top_p=1.0, n=1)
    async with kept(stages.queue, "doctor", prompts):
        responses = await stages.rollouter.generate(prompts, asked)
        responses = [one for one in responses if len(one.rollout_logprobs)]
        samples = list(Batch.packed(list(map(supervised, responses))))
        await stages.trainer.supervise(samples, config.train.lr)
    await stages.rollouter.snapshot(1)
    update = await stages.rollouter.push()
    return Measured(responses, meta, first.metrics, update.metrics)


def synced(measured: Measured, quantized_by: str) -> Iterator[Finding]:
    """Results of the two syncs: trainer and rollout engines on held rows; one update.

    ``quantized_by``: the key by which the engines are quantized, if that hides outdated weights.
    """
    for what, metrics in (("first weights", measured.first), ("one update", measured.update)):
        replicas = sum(key.endswith("/freshness_nats") for key in metrics if "student" in key)
        if "sync/freshness_nats" not in metrics:
            message = f"{what}: the trainer and the rollout engines were not compared"
            yield Finding(TOPIC, "warning", message, "set sync.verify_every")
            continue
        for rows, key, limit in FRESHNESS.values():
            if key not in metrics:
                continue
            found, bound = metrics[key], metrics[limit]
            message = (
                f"{what}, rollout engines against trainer: mean |Δ| {found:.2g} nats on {rows}, "
                f"bound {bound:.2g} ({BOUND}); replicas with the trainer's weights: {replicas}"
            )
            fresh = found <= bound and not metrics.get("sync/wrong_weights")
            if fresh and quantized_by:
                message += f"; no proof: quantized engines ({quantized_by}) hide outdated weights"
                yield Finding(TOPIC, "warning", message, "use engines that are not quantized")
                continue
            yield Finding(TOPIC, "ok" if fresh else "error", message, "" if fresh else DTYPES)
