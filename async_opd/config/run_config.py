"""The config of a run: frozen pydantic sections; the docstring under a field is its documentation.

Defaults are the recommended run. ``async_opd.config.load`` loads files and overrides and makes
error messages; ``async_opd.checks.preflight`` checks the files that a config names. Imports nothing
heavier than pydantic.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Annotated, Any, Literal, Self

from pydantic import Field, PositiveInt, field_validator, model_validator

from async_opd.config.data import ColdStartConfig, DataConfig
from async_opd.config.engine import EngineConfig
from async_opd.config.loss import ForwardKLConfig, Loss, RewardConfig, nucleus_faults
from async_opd.config.plan import PlanConfig
from async_opd.config.reliability import (
    CheckpointConfig,
    GuardrailConfig,
    ShutdownConfig,
    SupervisionConfig,
    TimeoutConfig,
)
from async_opd.config.section import ModelSection, Section
from async_opd.config.teachers import EndpointTeacher, SelfTeacher, TeacherConfig
from async_opd.config.train import AsyncConfig, SyncConfig, TrainConfig


class SizesError(ValueError):
    """Sizes that do not fit each other; ``faults`` are (dotted key, fault, remedy)."""

    def __init__(self, faults: list[tuple[str, str, str]]) -> None:
        super().__init__("; ".join(f"{key}: {message}" for key, message, _ in faults))
        self.faults = faults


class StudentConfig(ModelSection):
    """The model that is trained."""


class RolloutConfig(Section):
    """Sampling of the student's responses."""

    replicas: int = Field(default=1, ge=1)
    """Independent engines of the student."""
    tensor_parallel: PositiveInt = 1
    """GPUs of each engine."""
    n: PositiveInt = 4
    """Rollouts of each prompt (its group)."""
    max_tokens: PositiveInt = 1024
    """Longest response in tokens; longer ones are cut off (``finish_reason: length``)."""
    temperature: float = Field(default=1.0, gt=0, le=2)
    """Sampling temperature; rollouts' log-probabilities are those of the tempered distribution."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of the sampled distribution; 1 samples from all tokens."""
    top_k: int = Field(default=0, ge=0)
    """Number of the most probable tokens that are sampled from; 0: all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Samples from tokens at least this fraction as probable as the best one; 0: from all."""
    reproducible: bool = False
    """Samples every rollout with its own seed, from ``seed`` and its uid, so that it does not
    depend on other requests. Sampling is slower; docs/reliability.md has the further conditions."""
    concurrency: PositiveInt | Literal["auto"] = "auto"
    """Rollouts in flight on each replica. ``auto`` follows the load of its engine (waiting
    requests, preemptions, KV cache). In both cases at most a sixteenth (and at least one) more
    than ``engine.max_num_seqs``."""
    placement: Literal["dedicated", "colocated"] = "dedicated"
    """``dedicated``: on GPUs of their own. ``colocated``: on the trainer's GPUs, alternating with
    it: when a batch is scored the engines finish their responses and sleep, the trainer takes its
    steps, its weights and optimizer move to host memory, and the engines wake (docs/cluster.md)."""
    with_: Literal["train"] | None = Field(default=None, alias="with")
    """The pool whose GPUs colocated engines share: each those of as many ranks as it has GPUs."""
    engine: EngineConfig = EngineConfig()
    """Settings of each engine."""

    @property
    def host(self) -> Literal["train"] | None:
        """The pool whose GPUs the engines share, if they are colocated."""
        return self.with_ if self.placement == "colocated" else None

    @model_validator(mode="after")
    def _colocated_has_a_pool(self) -> Self:
        if (self.placement == "colocated") != (self.with_ is not None):
            raise ValueError("'placement: colocated' and 'with: train' together")
        return self


class QueueConfig(Section):
    """The message queue between the stages. Producers wait while it is full."""

    max_samples: PositiveInt = 4096
    """Maximum of samples in a topic, leased ones included."""
    max_mib: PositiveInt = 4096
    """Maximum size of a topic in MiB, leased samples included."""
    lease_s: float = Field(default=600, gt=0)
    """A stage that does not renew its leases for so long loses their samples to the next one. While
    it lives it renews its leases, however long it works on them."""


class EvalConfig(Section):
    """Accuracy on ``data.eval``: before training, every ``every`` weight versions, and after."""

    every: int = Field(default=5, ge=0)
    """Weight versions between two evaluations; 0: only before and after."""
    max_prompts: PositiveInt | None = None
    """Number of prompts of each data source, from the first on; by default all."""
    temperature: float = Field(default=0.0, ge=0, le=2)
    """Sampling temperature; 0 is greedy."""
    max_tokens: PositiveInt | None = None
    """Longest response; by default ``rollout.max_tokens``."""
    grader: str = "exact"
    """``exact``, ``math_verify``, or a function ``module:function`` that takes (response, row) and
    returns a number from 0 to 1. Rows from reasoning-gym are graded by their own verifier."""
    teachers: bool = True
    """Also measures each teacher on its own data sources once, before training."""


class GradingConfig(Section):
    """Bounds of graders, which run in separate processes, so that a hanging one can be ended."""

    timeout_s: float = Field(default=60, gt=0)
    """Timeout of grading one response. Its grader's process is ended then, and the response is a
    dead letter; an evaluation counts it, and excludes it from the mean."""
    processes: PositiveInt = 4
    """Maximum of grader processes, and of responses graded at the same time, in each student
    replica (for a reward) and in the driver (for evaluation). They start when they are needed."""
    memory_gb: float = Field(default=16, gt=0)
    """Memory bound of a grader's process, in 1e9 bytes of its own data (``RLIMIT_DATA``: mapped
    files do not count). A larger allocation fails, and the response is a dead letter. Each process
    that a grader starts has the same bound."""
    pass_env: list[str] = Field(default=[])
    """Environment variables that graders get although they hold secrets, such as the key of a
    judge. Graders inherit all variables that look like no secret by name and value."""
    allow_eval: bool = False
    """Allows reasoning-gym tasks whose verifiers evaluate responses as Python (puzzle24, countdown,
    n_queens and others, see ``grading/verifiers.py``): a response can then run code as the user.
    Otherwise ``check`` refuses graded rows of these tasks, and their responses are dead letters."""


class LogConfig(Section):
    """Destinations of metrics, besides ``metrics.jsonl``."""

    console: Literal["auto", "live", "plain", "off"] = "auto"
    """Live display, plain lines, or nothing; ``auto``: live on a terminal."""
    wandb: Literal["auto", "online", "offline", "off"] = "auto"
    """``auto``: online if you are logged in, else offline."""
    project: str = "async_opd"
    """wandb project."""

    @field_validator("console", "wandb", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads a bare off as false


class ClusterConfig(Section):
    """The Ray cluster of the run, and the device of its pools."""

    address: str | None = None
    """An existing Ray cluster to join (``ray://`` is not supported); by default a local one."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of all pools; ``auto``: GPUs if there are any."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of a GPU in GiB, which ``check`` and ``plan`` compare pools with (docs/memory.md). By
    default what nvidia-smi says on this machine; a check of other machines' GPUs needs it (an H100
    of 80 GB has 79.6)."""
    interface: str | None = Field(default=None, pattern=r"^[\w.-]{1,15}$")
    """Network interface (``eth0``) on which weight sync and ranks of a joined cluster listen and
    connect; every node needs it. By default that of the node's address in Ray; NCCL chooses for
    itself. A local run listens on the loopback only."""
    ports: str | None = Field(default=None, pattern=r"^\d{4,5}-\d{4,5}$")
    """Ports, as ``20000-20099``, on which the run's own servers listen: the rendezvous of a weight
    sync and that of ranks, on the trainer's node. By default any free port."""

    @property
    def port_range(self) -> range | None:
        """The ports of ``ports``; None for any."""
        if self.ports is None:
            return None
        low, high = map(int, self.ports.split("-"))
        return range(low, high + 1)

    @field_validator("ports")
    @classmethod
    def _are_ports(cls, value: str | None) -> str | None:
        if value is not None:
            low, high = map(int, value.split("-"))
            if not 1024 <= low <= high <= 65535:
                raise ValueError("two ports from 1024 to 65535, the lower one first")
        return value

    @model_validator(mode="after")
    def _interface_is_of_a_cluster(self) -> Self:
        if self.interface is not None and self.address is None:
            raise ValueError("'interface' with 'address' only: a local run uses the loopback")
        return self


class RunConfig(Section):
    """All settings of a run."""

    name: str = "run"
    """Name of the run: its wandb name and its directory below ``runs/``."""
    seed: int = 0
    """Seed of data order, sampling and training."""
    run_dir: str | None = None
    """Directory of the results; by default ``runs/<name>-<time>``."""
    student: StudentConfig
    teachers: dict[str, TeacherConfig] = Field(min_length=1)
    """Teachers by name."""
    data: DataConfig
    rollout: RolloutConfig = RolloutConfig()
    loss: Annotated[Loss, Field(discriminator="kind")] = ForwardKLConfig()
    reward: RewardConfig | None = None
    """Task reward beside the distillation loss, or instead of it with ``loss.weight`` 0."""
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
    plan: PlanConfig | None = None
    """Speeds for ``async_opd plan``; a run does not read them."""

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
        if self.reward is not None and group < 2:
            fault = f"found {group}, expected at least 2: an advantage is relative to the group"
            yield "rollout.n", fault, "for example 4"
        yield from self._keeping_faults()
        if rollout.host is not None:
            yield from self._colocation_faults()
        yield from self.train.mesh_faults()
        yield from nucleus_faults(
            self.loss, self.reward, rollout.top_p, rollout.top_k, rollout.min_p
        )

    def _keeping_faults(self) -> Iterator[tuple[str, str, str]]:
        """What ``checkpoint.keep_best`` and ``guardrail.mode: roll_back`` need."""
        best = self.checkpoint.keep_best
        if best is not None and not (self.data.eval and self.eval.every):
            missing = "eval.every is 0" if self.data.eval else "data.eval has no source"
            fault = f"found {best}, but {missing}: no two checkpoints are compared"
            yield "checkpoint.keep_best", fault, "evaluate during training, or remove it"
        if self.guardrail.mode == "roll_back" and not self.supervision.max_restarts:
            fault = "found roll_back, which rebuilds the trainer, but supervision.max_restarts is 0"
            yield "guardrail.mode", fault, "raise supervision.max_restarts"
        if self.rollout.host == "train" and self.train.offload == "parameters":
            fault = "found parameters: with rollout on its GPUs a rank is offloaded between turns"
            yield "train.offload", fault, "set it to moments or none"
        if self.guardrail.mode == "roll_back" and not (self.checkpoint.every or best):
            fault = "found roll_back, but checkpoint.every is 0: there is nothing to go back to"
            yield "guardrail.mode", fault, "set checkpoint.every"

    def _colocation_faults(self) -> Iterator[tuple[str, str, str]]:
        """What does not go together with rollout engines on the trainer's GPUs."""
        if self.sync.backend == "nccl":
            fault = "found nccl, which refuses two processes on one GPU: the trainer and an engine"
            yield "sync.backend", fault, "set it to auto, which is gloo here"
        for name, teacher in self.teachers.items():
            if teacher.host is not None:
                fault = (
                    "found colocated, on GPUs that rollout engines and the trainer share already"
                )
                remedy = "set it to dedicated, or rollout.placement"
                yield f"teachers.{name}.placement", fault, remedy

    def teacher_of(self, data_source: str) -> str | None:
        """The name of the teacher that scores a data source, if there is one."""
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

    @property
    def prompt_templates(self) -> dict[str, str]:
        """The prompt templates of the teachers that have one, by name."""
        teachers = self.teachers.items()
        return {name: t.prompt_template for name, t in teachers if t.prompt_template is not None}

    @property
    def versions(self) -> int:
        """Number of weight versions of the run: one per ``sync_steps``, and one for a remainder."""
        return math.ceil(self.train.steps / self.async_.sync_steps)

    @property
    def max_in_flight(self) -> int:
        """Samples that may be admitted and not yet trained at one time: ⌊(1 + s) · K · B⌋.

        The budget gives this bound: v · K · B samples are trained when the engines have version v.
        """
        share = 1 + Fraction(str(self.async_.staleness_threshold))
        return math.floor(share * self.async_.sync_steps * self.train.batch_size)

    def version_after(self, step: int) -> int:
        """The newest weight version whose weights are complete after a step."""
        return self.versions if step == self.train.steps else step // self.async_.sync_steps
