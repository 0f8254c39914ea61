"""The config of a run: frozen pydantic sections; the docstring under a field is its documentation.

Defaults are the recommended run. ``async_opd.config.load`` loads files and overrides and makes
error messages; ``async_opd.checks.preflight`` checks the files that a config names. Imports nothing
heavier than pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Any, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from async_opd.config.sections.cluster import ClusterConfig, QueueConfig
from async_opd.config.sections.data import ColdStartConfig, DataConfig, beginnings
from async_opd.config.sections.elastic import Pooled
from async_opd.config.sections.environment import ENVIRONMENT, EnvironmentConfig
from async_opd.config.sections.evaluation import EvalConfig, GradingConfig
from async_opd.config.sections.log import LogConfig, ReportConfig
from async_opd.config.sections.loss import (
    ForwardKLConfig,
    Loss,
    RewardConfig,
    corrects,
    nucleus_faults,
)
from async_opd.config.sections.plan import PlanConfig
from async_opd.config.sections.reliability import (
    CheckpointConfig,
    GuardrailConfig,
    ShutdownConfig,
    SupervisionConfig,
    TimeoutConfig,
)
from async_opd.config.sections.rollout import RolloutConfig, StudentConfig
from async_opd.config.sections.section import CHECK_NAMES, Name, Section
from async_opd.config.sections.sync import AsyncConfig, SyncConfig
from async_opd.config.sections.teachers import EndpointTeacher, SelfTeacher, TeacherConfig
from async_opd.config.sections.train import TrainConfig


class SizesError(ValueError):
    """Sizes that do not fit each other; ``faults`` are (dotted key, fault, remedy)."""

    def __init__(self, faults: list[tuple[str, str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {message}" for key, message, _ in faults))
        self.faults = faults


class RunConfig(Section):
    """All settings of a run."""

    name: Name = "run"
    """Name of the run: its wandb name and its directory below ``runs/``. As all names in a config,
    it has at most 100 printable characters, on one line."""
    seed: int = Field(default=0, ge=0, lt=1 << 31)
    """Seed of data order, sampling and training."""
    run_dir: str | None = None
    """Directory of the results; by default ``runs/<name>-<time>``."""
    student: StudentConfig
    teachers: dict[Name, TeacherConfig] = Field(min_length=1)
    """Teachers by name."""
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    loss: Annotated[Loss, Field(discriminator="kind")] = ForwardKLConfig()
    reward: RewardConfig | None = None
    """Task reward beside the distillation loss, or instead of it with ``loss.weight`` 0."""
    environment: EnvironmentConfig | None = None
    """Environment of episodes with several turns; by default every rollout is one answer."""
    train: TrainConfig = TrainConfig()
    cold_start: ColdStartConfig | None = None
    """Supervised steps before distillation begins."""
    async_: AsyncConfig = Field(default=AsyncConfig(), alias="async")
    sync: SyncConfig = SyncConfig()
    queue: QueueConfig = QueueConfig()
    eval: EvalConfig = EvalConfig()
    grading: GradingConfig = GradingConfig()
    guardrail: GuardrailConfig = GuardrailConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    shutdown: ShutdownConfig = ShutdownConfig()
    cluster: ClusterConfig = ClusterConfig()
    timeouts: TimeoutConfig = TimeoutConfig()
    supervision: SupervisionConfig = SupervisionConfig()
    report: ReportConfig = ReportConfig()
    plan: PlanConfig | None = None
    """Speeds for ``async_opd plan``; a run does not read them."""

    @field_validator("name")
    @classmethod
    def _is_below_runs(cls, name: str, info: ValidationInfo) -> str:
        if info.context == CHECK_NAMES and (name.startswith("/") or ".." in name.split("/")):
            raise ValueError("a name that does not lead out of runs/")
        return name

    @field_validator("teachers", mode="before")
    @classmethod
    def _teachers_have_a_kind(cls, teachers: Any) -> Any:
        """Without a ``kind``, a teacher is one of kind ``vllm``."""
        if not isinstance(teachers, dict):
            return teachers
        return {
            name: {"kind": "vllm", **teacher} if isinstance(teacher, dict) else teacher
            for name, teacher in teachers.items()
        }

    @model_validator(mode="before")
    @classmethod
    def _environments_grade(cls, given: Any) -> Any:
        """With an environment its reward is the grade, unless a grader is named, or it has none."""
        environment = given.get("environment") if isinstance(given, dict) else None
        if not isinstance(environment, dict) or environment.get("kind") == "tools":
            return given
        sections = {"eval": given.get("eval", {}), "reward": given.get("reward")}
        graded = {
            key: {"grader": ENVIRONMENT, **one}
            for key, one in sections.items()
            if isinstance(one, dict)
        }
        return {**given, **graded}

    @model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        """Refuses sizes that would starve or dead-lock the pipeline."""
        faults = list(self._size_faults())
        if faults:
            raise SizesError(faults)
        return self

    def _size_faults(self) -> Iterator[tuple[str, str, str]]:
        size, rollout, group = self.train.batch_size, self.rollout, self.rollout.n
        if size % group:
            low, high = size // group * group, -(-size // group) * group
            yield (
                "train.batch_size",
                f"found {size}, expected a multiple of rollout.n ({group}): groups are whole",
                f"for example {low or high} or {high}",
            )
        if (room := self.queue.max_samples) < size:
            fault = f"found {room}, which cannot hold one batch (train.batch_size = {size})"
            yield "queue.max_samples", fault, f"at least {size}"
        if self.loss.weight == 0 and self.reward is None:
            yield "loss.weight", "found 0 without a reward: nothing is learned", "add a reward"
        if self.loss.importance_when_fresh == "exact" and not corrects(self.loss):
            fault = "found exact, but the loss has no importance weights"
            yield "loss.importance_when_fresh", fault, "leave it out, or set loss.importance"
        if self.eval.n > 1 and not self.eval.temperature:
            fault = "but with eval.temperature 0 all answers to a prompt are the same"
            yield "eval.n", f"found {self.eval.n}, {fault}", "set eval.temperature, as to 0.7"
        if self.reward is not None and group < 2:
            fault = f"found {group}, expected at least 2: an advantage is relative to the group"
            yield "rollout.n", fault, "for example 4"
        yield from self._episode_faults()
        yield from self._weight_faults()
        yield from self._period_faults()
        yield from self._keeping_faults()
        yield from self._elastic_faults()
        if self.cluster.trainer_recovery == "replica":
            yield from self._recovery_faults()
        yield from self._curriculum_faults()
        if rollout.host is not None:
            yield from self._colocation_faults()
        yield from self.train.mesh_faults()
        yield from nucleus_faults(
            self.loss, self.reward, rollout.top_p, rollout.top_k, rollout.min_p
        )

    def _episode_faults(self) -> Iterator[tuple[str, str, str]]:
        """Settings that do not go together with episodes of several turns, or that need them."""
        graders = {"eval.grader": self.eval.grader if self.data.eval else ""}
        graders |= {"reward.grader": self.reward.grader} if self.reward else {}
        for key, grader in graders.items():
            if grader == ENVIRONMENT and self.environment is None:
                yield key, "found environment, but there is none", "add a section environment"
            elif grader == ENVIRONMENT and self.environment and self.environment.kind == "tools":
                fault = "found environment, but functions (kind: tools) give no reward"
                yield key, fault, "name a grader, or take kind: class with get_reward"
        if self.environment is not None:
            yield from self.environment.faults()
            servers = [n for n, one in self.teachers.items() if isinstance(one, EndpointTeacher)]
            if servers and self.data.eval and self.eval.teachers:
                fault = (
                    f"found true, but teachers.{servers[0]} is a server, which plays no episodes"
                )
                yield "eval.teachers", fault, "set it to false: its scores need no episodes"
            cold = self.cold_start
            if cold is not None and cold.answers == "given":
                fault = (
                    "found given, but given answers have no turns, and no tools in their prompts"
                )
                yield "cold_start.answers", fault, "set it to teacher, or remove cold_start"
            if servers and cold is not None and cold.answers == "teacher":
                fault = f"found teacher, but teachers.{servers[0]} is a server, without episodes"
                yield "cold_start.answers", fault, "remove cold_start"
            other = [n for n, one in self.teachers.items() if one.renders or one.prompt_template]
            if cold is not None and cold.answers == "teacher" and other:
                fault = f"found a cold start, but teachers.{other[0]} reads other prompts than the"
                fault += " student: its episodes would be trained after its own context"
                yield "cold_start", fault, "remove it, or let the teacher read as the student does"
            if self.train.routing == "replay":
                fault = "found replay, but engines return the experts of single answers only"
                yield "train.routing", fault, "set it to own, or remove environment"

    def _weight_faults(self) -> Iterator[tuple[str, str, str]]:
        """Automatic weights that have nothing to balance."""
        fixed = [name for name, teacher in self.teachers.items() if teacher.weight != "auto"]
        if len(fixed) == len(self.teachers):
            return
        fault = ""
        if fixed:
            fault = f"found auto, but a number for {', '.join(fixed)}: it is of all teachers"
        elif len(self.teachers) == 1:
            fault = "found auto for the only teacher, which has no other to be balanced with"
        elif self.loss.weight == 0:
            fault = "found auto, but loss.weight is 0: no teacher's loss is part of the sum"
        if fault:
            name = next(name for name in self.teachers if name not in fixed)
            yield f"teachers.{name}.weight", fault, "remove it, or set numbers"

    def _period_faults(self) -> Iterator[tuple[str, str, str]]:
        """Periods in versions and in steps at the same time, or in neither."""
        for name, section in (("checkpoint", self.checkpoint), ("eval", self.eval)):
            every, steps = section.every, section.every_steps
            if every is not None and steps is not None:
                fault = f"found {steps} beside {name}.every, which is {every}"
                remedy = f"remove one of them; {name}.every=null leaves out that of the file"
                yield f"{name}.every_steps", fault, remedy
            elif every is None and steps is None:
                yield f"{name}.every", "found null without every_steps", "set it; 0: no period"

    def _keeping_faults(self) -> Iterator[tuple[str, str, str]]:
        """The needs of ``checkpoint.keep_best`` and ``guardrail.mode: roll_back``."""
        best, sync_steps = self.checkpoint.keep_best, self.async_.sync_steps
        if best is not None and not (self.data.eval and self.steps_between(self.eval)):
            missing = "eval.every is 0" if self.data.eval else "data.eval has no source"
            fault = f"found {best}, but {missing}: no two checkpoints are compared"
            yield "checkpoint.keep_best", fault, "evaluate during training, or remove it"
        if best is not None and (steps := self.eval.every_steps or 0) % sync_steps:
            fault = f"found {steps}, expected a multiple of async.sync_steps ({sync_steps}): "
            fault += "checkpoint.keep_best compares weights that the engines have had"
            low, high = steps // sync_steps * sync_steps, -(-steps // sync_steps) * sync_steps
            yield "eval.every_steps", fault, f"for example {low or high} or {high}"
        if self.guardrail.mode == "roll_back" and not self.supervision.max_restarts:
            fault = "found roll_back, which rebuilds the trainer, but supervision.max_restarts is 0"
            yield "guardrail.mode", fault, "raise supervision.max_restarts"
        if self.rollout.host == "train" and self.train.offload == "parameters":
            fault = "found parameters: with rollout on its GPUs a rank is offloaded between turns"
            yield "train.offload", fault, "set it to moments or none"
        if self.guardrail.mode == "roll_back" and not (self.steps_between(self.checkpoint) or best):
            fault = "found roll_back, but checkpoint.every is 0: there is nothing to go back to"
            yield "guardrail.mode", fault, "set checkpoint.every"

    def _recovery_faults(self) -> Iterator[tuple[str, str, str]]:
        """Runs whose trainer cannot go on from what an engine has."""
        sync, engines = self.sync, "engines have rounded weights"
        lacks = [
            ("rollout.engine.quantization", self.rollout.engine.scheme is not None, engines),
            ("sync.fake_quantization", sync.fake_quantization is not None, engines),
            ("train.lora", self.train.lora is not None, "engines have adapters, or merged ones"),
            ("sync.verify_every", sync.verify_every != 1, "1 verifies each version"),
            (
                "supervision.max_restarts",
                self.supervision.max_restarts < 2,
                "a recovery that fails takes a second restart",
            ),
            *(
                (f"teachers.{name}.weight", teacher.weight == "auto", "auto is in checkpoints only")
                for name, teacher in self.teachers.items()
            ),
        ]
        for key, found, why in lacks:
            if found:
                fault = f"found replica, but {key} excludes it: {why}"
                yield "cluster.trainer_recovery", fault, f"set it to checkpoint, or change {key}"

    def _elastic_faults(self) -> Iterator[tuple[str, str, str]]:
        """Pools that are to follow the cluster, where they cannot."""
        hosts = {teacher.host for teacher in self.teachers.values()}
        named: dict[str, tuple[Pooled, bool]] = {
            "rollout": (self.rollout, self.rollout.host is not None or "rollout" in hosts),
            "eval": (self.eval, False),
            **{f"teachers.{name}": (t, t.host is not None) for name, t in self.teachers.items()},
        }
        for name, (pool, shares) in named.items():
            fewest, most = pool.min_replicas, pool.max_replicas
            if fewest < most and shares:
                fault = f"found {fewest} to {most}, but pools that share GPUs do not grow"
                yield f"{name}.replicas", fault, "set a number"
            elif fewest < most and self.cluster.address is None:
                fault = f"found {fewest} to {most}, but a local run has one machine"
                remedy = "set cluster.address (auto joins the cluster of RAY_ADDRESS), or a number"
                yield f"{name}.replicas", fault, remedy

    def _curriculum_faults(self) -> Iterator[tuple[str, str, str]]:
        """Steps without a source, and sources with steps where there are none."""
        train, steps = self.data.train, self.train.steps
        starts = beginnings(train)
        if self.train.epochs is not None and len(starts) > 1:
            fault = "found epochs, but sources in data.train begin or end at a step"
            yield "train.epochs", fault, "set train.steps instead"
        for step in starts if train and self.train.epochs is None else ():
            if step <= steps and not any(source.is_active(step) for source in train):
                fault = f"no source has prompts at step {step} of {steps}"
                yield "data.train", fault, "change a from_step or until_step"
        others = {"data.eval": self.data.eval}
        if self.cold_start is not None:
            others["cold_start.data"] = self.cold_start.data
        for key, sources in others.items():
            if len(beginnings(sources)) > 1:
                yield key, "found from_step or until_step", "only data.train has steps: remove it"

    @property
    def sync_backend(self) -> str:
        """``sync.backend``; instead of ``auto`` the one where NCCL is none: on shared GPUs.

        Only a run that joins no cluster is known to be on one machine.
        """
        if self.sync.backend != "auto" or self.rollout.host is None:
            return self.sync.backend
        return "gloo" if self.cluster.joins else "shared_memory"

    def _colocation_faults(self) -> Iterator[tuple[str, str, str]]:
        """Settings that exclude rollout engines on the trainer's GPUs."""
        if self.sync.backend == "nccl":
            fault = "found nccl, which refuses two processes on one GPU: the trainer and an engine"
            yield "sync.backend", fault, "set it to auto, which goes through host memory here"
        for name, teacher in self.teachers.items():
            if teacher.host == "train":
                fault = (
                    "found train, whose GPUs rollout engines share: teachers are guests of these"
                )
                yield f"teachers.{name}.with", fault, "set it to rollout: the GPUs are the same"

    @property
    def lone_teacher(self) -> str | None:
        """The only teacher, if it has no ``sources``: it scores every row."""
        names = [name for name, teacher in self.teachers.items() if teacher.sources is None]
        return names[0] if len(names) == len(self.teachers) == 1 else None

    def teacher_of(self, data_source: str) -> str | None:
        """The name of the teacher that scores a data source, if there is one."""
        if self.lone_teacher is not None:
            return self.lone_teacher
        for name, teacher in self.teachers.items():
            if data_source in (teacher.sources if teacher.sources is not None else [name]):
                return name
        return None

    def teacher_model(self, name: str) -> str:
        """The directory or hub id of a teacher's model, or its name on a server."""
        teacher = self.teachers[name]
        if isinstance(teacher, EndpointTeacher):
            return teacher.served_model
        return self.student.model if isinstance(teacher, SelfTeacher) else teacher.model

    def template_model(self, name: str) -> str | None:
        """The directory or hub id with a teacher's own template; None: a server's, not named."""
        teacher = self.teachers[name]
        return teacher.model if isinstance(teacher, EndpointTeacher) else self.teacher_model(name)

    @property
    def versions(self) -> int:
        """Number of weight versions of the run: one per ``sync_steps``, and one for a remainder."""
        return math.ceil(self.train.steps / self.async_.sync_steps)

    def steps_between(self, periodic: CheckpointConfig | EvalConfig) -> int:
        """Steps between two checkpoints, or evaluations, during training; 0: there are none."""
        return periodic.every_steps or (periodic.every or 0) * self.async_.sync_steps

    @property
    def response_tokens(self) -> int:
        """The most sampled tokens of a rollout: those of all turns of an episode."""
        return self._sampled(self.rollout.max_tokens)

    @property
    def answer_tokens(self) -> int:
        """The most sampled tokens of a rollout, or of an answer of an evaluation."""
        return self._sampled(max(self.rollout.max_tokens, self.eval.max_tokens or 0))

    def _sampled(self, turn_tokens: int) -> int:
        if self.environment is None:
            return turn_tokens
        most = turn_tokens * self.environment.max_turns
        return min(most, self.environment.max_tokens or most)

    @property
    def context_tokens(self) -> int:
        """The most tokens of an episode's context after its prompt, as far as they are known.

        They are observations, one after each turn but the last, and with ``history: template`` the
        whole history once more for each segment; at most what the engine takes.
        """
        if self.environment is None:
            return 0
        turns, observation = self.environment.max_turns, self.environment.max_observation_tokens
        most, longest = (turns - 1) * observation, self.rollout.engine.max_model_len
        if self.environment.history == "template":
            most += turns * (turns - 1) // 2 * (observation + self.rollout.max_tokens)
            longest = longest and turns * longest
        return min(most, longest or most)

    @property
    def max_in_flight(self) -> int:
        """Samples that may be admitted and not yet trained at one time: ⌊(1 + s) · K · B⌋.

        The budget gives this bound: v · K · B samples are trained when the engines have version v.
        """
        share = 1 + Fraction(str(self.async_.staleness_threshold))
        return math.floor(share * self.async_.sync_steps * self.train.batch_size)

    @property
    def refreshes(self) -> dict[str, int]:
        """Versions between two refreshes of each teacher that is refreshed."""
        return {
            name: teacher.refresh_every
            for name, teacher in self.teachers.items()
            if isinstance(teacher, SelfTeacher) and teacher.refresh_every
        }

    def version_after(self, step: int) -> int:
        """The newest weight version whose weights are complete after a step."""
        return self.versions if step == self.train.steps else step // self.async_.sync_steps
