"""A trainer's stage and a student's replicas in one process, all of them real, on a small model."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from async_opd.config.precision import SCHEMES
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.sections.reliability import SupervisionConfig
from async_opd.models.adapted import adapter_kwargs
from async_opd.models.engine_args import engine_dtype, engine_kwargs
from async_opd.processes.events import State
from async_opd.processes.members import Member, MemberSet, Policy
from benchmarks.faulty_worker import WORKER

if TYPE_CHECKING:
    from async_opd.config.sections.train import LoraConfig
    from rollouter.replica import StudentReplica
    from trainer.learner import Learner

STEP = 1e-3
"""How far a sync moves each weight."""


def make_student(path: Path, family: str = "qwen2", **sizes: int) -> Path:
    """A model with random matrices; norms are 1 and biases 0, as a new model has them."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(
        family,
        vocab_size=1024,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.1,
        **sizes,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def make_learner(model: Any, dtype: str, lora: LoraConfig | None = None) -> Learner:
    """A learner of one rank, which sends its weights or adapters in the engines' ``dtype``."""
    from async_opd.config.sections.loss import ForwardKLConfig
    from async_opd.config.sections.train import TrainConfig
    from trainer.learner import Learner
    from trainer.losses import build_objective
    from trainer.rank import Rank
    from trainer.student.adapters import add_adapters
    from trainer.student.placed import PlacedStudent

    if lora is not None:
        add_adapters(model, lora)
    train = TrainConfig(lr=STEP, steps=1, dtype="float32", lora=lora)
    objective, wire = build_objective(ForwardKLConfig()), getattr(torch, dtype)
    return Learner(Rank(PlacedStudent(model, objective, train, torch.device("cpu")), wire))


def make_replicas(
    path: Path, engine: EngineConfig, count: int, lora: LoraConfig | None = None
) -> list[StudentReplica]:
    """Replicas that are being built, whose engines can be made to load weights wrongly."""
    from async_opd.core.stages import SamplingSpec
    from async_opd.queue.message_queue import MessageQueue
    from rollouter import engine as engine_module
    from rollouter.replica import StudentReplica
    from rollouter.spec import StudentEngineSpec

    kwargs = engine_kwargs(
        engine,
        model=str(path),
        device="cpu",
        tensor_parallel=1,
        seed=0,
        trust_remote_code=False,
    ) | adapter_kwargs(lora, str(path))
    queue = MessageQueue(("prompts", "dead"), 100, 1 << 30, 60.0)
    sampling = SamplingSpec(8, 1.0, 1.0, 1)
    engine_module.EXTENSION = WORKER
    specs = (
        StudentEngineSpec(f"student/{index}", kwargs, sampling, (), "gloo")
        for index in range(count)
    )
    return [StudentReplica(spec, queue) for spec in specs]


class World:
    """A trainer, and replicas that its weights are synced to.

    ``kind`` is the dtype of the engines, or the scheme by which they quantize their weights.
    """

    def __init__(
        self, path: Path, kind: str, replicas: int = 1, lora: LoraConfig | None = None
    ) -> None:
        from transformers import AutoModelForCausalLM

        from async_opd.weight_sync.coordinator import BroadcastSync
        from async_opd.weight_sync.freshness import Freshness
        from async_opd.weight_sync.layout import held_rows
        from rollouter.transports.gloo import GlooSender
        from trainer.publisher import Publisher
        from trainer.stage import TrainerStage
        from trainer.student.quantization import parts_of

        self.kind = kind
        named: dict[str, Any] = {"quantization": kind} if kind in SCHEMES else {"dtype": kind}
        engine = EngineConfig(max_num_seqs=16, cpu_kv_cache_mib=64, **named)
        dtype = engine_dtype(engine, "cpu")
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.learner = make_learner(self.model, dtype, lora)
        self.publisher = Publisher(
            self.learner.named_weights,
            lambda: GlooSender("127.0.0.1", 60.0, 1 << 18),
            digests=True,
            quantize=parts_of if engine.quantization else None,
        )
        self.trainer = TrainerStage(
            self.learner,
            self.publisher,
            cast(Any, None),
            max_version_lag=None,
            model_dir=str(path),
            held_rows=held_rows(self.model.config.vocab_size, 128),
        )
        self.replicas = make_replicas(path, engine, replicas, lora)
        members = {f"student/{i}": replica for i, replica in enumerate(self.replicas)}
        supervision = SupervisionConfig(max_restarts=1 << 20, delay_s=1e-6)
        policy = Policy[Any](supervision=supervision, rebuild=self._rebuilt)
        self.members: MemberSet[Any] = MemberSet("rollout", members, policy)
        self.freshness = Freshness(every=1)
        self.sync = BroadcastSync(
            self.trainer,
            self.members,
            [1] * replicas,
            on_sync="keep",
            timeout_s=120.0,
            freshness=self.freshness,
        )
        self.version = 0

    def move(self, step: float = STEP) -> None:
        """Moves what is trained by ``step``, up or down, as AdamW does at this learning rate."""
        with torch.no_grad():
            for weight in filter(lambda weight: weight.requires_grad, self.model.parameters()):
                weight.add_(torch.randn_like(weight).sign_(), alpha=step)

    def train_away(self) -> None:
        """Moves norms and biases far from their first values."""
        with torch.no_grad():
            for name, weight in self.model.named_parameters():
                if weight.ndim == 1:
                    weight.add_(torch.randn_like(weight), alpha=0.5 if "bias" in name else 0.3)

    async def push(self) -> dict[str, float]:
        """A sync of the current weights; its metrics."""
        self.version += 1
        await self.sync.snapshot(self.version)
        return (await self.sync.push()).metrics

    @property
    def failures(self) -> dict[str, Exception]:
        """Why members were ejected."""
        return {m.name: m.failure for m in self.members.all if m.failure is not None}

    async def mend(self) -> None:
        """The ejected members join again, with the same engines and a snapshot of now."""
        if self.failures:
            self.version += 1
            await self.sync.snapshot(self.version)
        for member in self.members.all:
            if member.state is State.EJECTED:
                await self.members.mend(member)

    async def _rebuilt(self, member: Member[Any]) -> Any:
        replica = self.replicas[member.index]
        await replica._rpc("end_update")
        await self.sync.rejoin(member.index, replica, 1)
        return replica


@asynccontextmanager
async def world(
    path: Path, kind: str, replicas: int = 1, lora: LoraConfig | None = None
) -> AsyncIterator[World]:
    """A connected world, whose engines still have the first values."""
    made = World(path, kind, replicas, lora)
    try:
        for replica in made.replicas:
            await replica.ready()
        await made.sync.connect()
        if lora is None:
            made.train_away()
        yield made
    finally:
        for replica in made.replicas:
            await replica.shutdown()
