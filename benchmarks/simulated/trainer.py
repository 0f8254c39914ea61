"""The real training stage over a learner and a publisher that only take time."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

from async_opd.cluster.trainer_actor import build_batcher
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.plan import TrainPlan
from async_opd.core.samples import Sample
from async_opd.core.stages import Queue
from async_opd.weight_sync.layout import Rendezvous, WeightMeta
from trainer.learner import LearnerReport
from trainer.stage import TrainerStage


class SimulatedLearner:
    """Sleeps in its thread, where the real one computes."""

    def __init__(self, speed: TrainPlan) -> None:
        self._speed = speed
        self.computed_tokens = 0

    def train_batch(self, samples: Sequence[Sample], images: object = None) -> LearnerReport:
        """One step."""
        tokens = sum(sample.rollout.tokens for sample in samples)
        time.sleep(self._speed.seconds(tokens))
        self.computed_tokens += tokens
        return LearnerReport({"loss/total": 0.0, "train/tokens": float(tokens)})


class SimulatedPublisher:
    """A snapshot takes time; sending takes the receivers' time."""

    def __init__(self, speed: TrainPlan) -> None:
        self._speed = speed

    def open(self, group: int, world_size: int, connected: Collection[int]) -> Rendezvous:
        """There is no group."""
        return Rendezvous("127.0.0.1", 0, world_size, 1.0, 1, b"")

    def connect(self, group: int) -> None:
        """There is no group."""

    def snapshot(self) -> WeightMeta:
        """Copies nothing."""
        time.sleep(self._speed.snapshot_s)
        return WeightMeta((), (), (), ())

    def send(self, group: int) -> float:
        """Sends nothing."""
        return 0.0


def build_simulated_trainer(
    config: RunConfig, device: str, queue: Queue, speed: TrainPlan
) -> TrainerStage:
    """A factory for ``async_opd.cluster.actor_factory.Factories``."""
    learner: Any = SimulatedLearner(speed)
    publisher: Any = SimulatedPublisher(speed)
    return TrainerStage(
        learner,
        publisher,
        build_batcher(config, queue),
        max_version_lag=config.async_.max_version_lag,
        model_dir="",
    )
