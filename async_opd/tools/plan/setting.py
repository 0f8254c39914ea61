"""The setting of a simulation: a pipeline with all of its sizes and speeds.

Times are seconds, lengths tokens, staleness weight versions. ``Lengths`` of responses
are those of the simulated engines, too.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from async_opd.config.sections.plan import RolloutPlan, TeacherPlan, TrainPlan


@dataclass(frozen=True)
class Lengths:
    """Response lengths: log-normal with this mean and this sigma of the logarithm, cut at ``most``.

    ``sigma`` 0 gives ``mean`` always. ``mean`` is that of the distribution before it is cut.
    """

    mean: float
    sigma: float
    most: int

    def sample(self, random_: random.Random) -> int:
        """One length from 1 to ``most``."""
        location = math.log(self.mean) - self.sigma**2 / 2
        return max(1, min(self.most, round(random_.lognormvariate(location, self.sigma))))


@dataclass(frozen=True)
class RolloutPoolSpec:
    """The student's replicas, each on ``gpus`` GPUs; groups have ``n`` rollouts.

    A replica has at most ``in_flight`` requests; those beyond the engine's ``slots`` wait in it.
    """

    replicas: int
    gpus: int
    speed: RolloutPlan
    slots: int
    in_flight: int
    n: int

    @property
    def running(self) -> int:
        """Requests that run on a replica when it is full."""
        return min(self.in_flight, self.slots)

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all replicas when they are full."""
        return self.replicas * self.running / self.speed.step(self.running)


@dataclass(frozen=True)
class TeacherPoolSpec:
    """One teacher's replicas, each on ``gpus`` GPUs, with its ``share`` of all prompts.

    A replica scores one batch of at most ``batch`` rollouts at a time.
    """

    name: str
    replicas: int
    gpus: int
    speed: TeacherPlan
    batch: int
    share: float


@dataclass(frozen=True)
class Setting:
    """Everything on which a prediction depends. ``ranks`` are the trainer's, one GPU each.

    ``least_ranks``: fewer do not hold the student in their GPUs' memory, as far as that is known.
    ``prompt_tokens`` is the mean prompt length. A sample staler than ``max_version_lag`` is sampled
    again (None: it is trained); with ``whole_groups`` a batch consists of whole groups. Every
    ``evaluation_every`` versions (0: never) the rollout replicas answer an evaluation beside their
    rollouts, for ``evaluation_s``. ``outside_s`` is a run's time before its first and after its
    last step.
    """

    steps: int
    batch_size: int
    sync_steps: int
    staleness_threshold: float
    lengths: Lengths
    prompt_tokens: float
    rollout: RolloutPoolSpec
    teachers: tuple[TeacherPoolSpec, ...]
    train: TrainPlan
    ranks: int
    on_sync: str = "keep"
    rolling: bool = False
    max_version_lag: int | None = None
    whole_groups: bool = False
    queue_samples: int = 4096
    evaluation_every: int = 0
    evaluation_s: float = 0.0
    outside_s: float = 0.0
    least_ranks: int = 1

    @property
    def gpus(self) -> int:
        """GPUs of all pools."""
        teachers = sum(teacher.replicas * teacher.gpus for teacher in self.teachers)
        return self.rollout.replicas * self.rollout.gpus + teachers + self.ranks

    @property
    def response_tokens(self) -> float:
        """Mean length of a response, cut at the limit."""
        return mean_length(self.lengths)

    @property
    def warmup_steps(self) -> int:
        """Steps that no rate counts: until the staleness budget was used up once."""
        versions = warmup_versions(self.staleness_threshold)
        return min(self.sync_steps * versions, self.steps // 2)

    def limits(self) -> dict[str, float]:
        """Each pool's own limit: its samples per second when it never waits."""
        response = self.response_tokens
        tokens = self.prompt_tokens + response
        limits = {"rollout": self.rollout.tokens_per_s / response}
        for teacher in self.teachers:
            batch_s = teacher.speed.seconds(teacher.batch * tokens)
            capacity = teacher.replicas * teacher.batch / batch_s
            limits[f"teacher/{teacher.name}"] = capacity / teacher.share
        step_s = self.train.seconds(self.batch_size * tokens, self.ranks) + self.train.turnaround_s
        version_s = self.sync_steps * step_s + self.train.snapshot_s
        limits["train"] = self.sync_steps * self.batch_size / version_s
        return limits


def warmup_versions(threshold: float) -> int:
    """Weight versions until rates are steady: two, and the threshold's.

    A threshold above 4 lets staleness grow for longer, but does not change rates.
    """
    return 2 + math.ceil(min(threshold, 4.0))


def mean_length(lengths: Lengths) -> float:
    """E[min(X, c)] of a log-normal X with mean m: m·Φ(d - σ) + c·(1 - Φ(d)), d = (ln c - μ)/σ."""
    mean, sigma, most = lengths.mean, lengths.sigma, lengths.most
    if sigma == 0:
        return max(1.0, min(mean, most))
    d = (math.log(most) - math.log(mean)) / sigma + sigma / 2
    return mean * phi(d - sigma) + most * (1 - phi(d))


def phi(x: float) -> float:
    """The standard normal distribution function."""
    return 0.5 * math.erfc(-x / math.sqrt(2))
