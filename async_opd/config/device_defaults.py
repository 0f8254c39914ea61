"""Values of ``auto`` by device, where the value that suits a CPU would starve a GPU or overfill it.

config ──resolved──► ``async_opd check``, the run's config.yaml

All callers take the values from here, by device. Imports nothing before it is called: the
trainer does without pydantic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from async_opd.config.sections.engine import EngineConfig
    from async_opd.config.sections.train import TrainConfig

MAX_NUM_SEQS = {"cpu": 64, "cuda": 256}
MAX_NUM_BATCHED_TOKENS = {"cpu": 2048, "cuda": 8192}
"""An engine without this argument has 2048 on every device: vLLM's larger defaults for GPUs are for
its own server and its offline class only. A GPU prefills, and scores, in steps of so many."""
Recomputation = Literal["none", "selective", "full"]
GRADIENT_CHECKPOINTING: dict[str, Recomputation] = {"cpu": "none", "cuda": "full"}
"""A 4B student keeps more than 46 GB of activations of 16,384 tokens otherwise."""
ALLOCATOR = {"cpu": {}, "cuda": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}}
"""Environment of the trainer's ranks. Rows have another length in each step, and chunks of logits
another number of rows: fixed segments would fragment. Engines do without it, since vLLM's sleep
frees memory that it allocates in a separate pool, which such segments are incompatible with."""
ALLOCATOR_KEYS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


class EngineSizes(NamedTuple):
    """The bounds of one step of an engine."""

    max_num_seqs: int
    max_num_batched_tokens: int


def engine_sizes(engine: EngineConfig, device: str) -> EngineSizes:
    """The sizes of an engine on a device. Tokens by ``auto`` are at least one for each sequence."""
    seqs, tokens = engine.max_num_seqs, engine.max_num_batched_tokens
    seqs = MAX_NUM_SEQS[device] if seqs == "auto" else seqs
    return EngineSizes(
        seqs, max(MAX_NUM_BATCHED_TOKENS[device], seqs) if tokens == "auto" else tokens
    )


def recomputation(train: TrainConfig, device: str) -> Recomputation:
    """Which activations a student on a device computes again in the backward pass."""
    given = train.gradient_checkpointing
    return GRADIENT_CHECKPOINTING[device] if given == "auto" else given


Offload = Literal["none", "moments", "parameters"]


def offloads(train: TrainConfig, device: str) -> Offload:
    """The part of a rank in host memory during training; on a CPU everything is."""
    return "none" if device == "cpu" else train.offload


ENTRIES_OF_A_THREAD = 5_000_000
"""Products of a smaller student are not worth dividing among threads."""


def train_threads(config: RunConfig, device: str, cores: int, entries: int) -> int:
    """CPU threads of each rank, of a student with so many parameters, on a separate machine.

    By ``auto`` on a CPU the ranks share the cores beside the engines, which have one thread each;
    at least two cores, since engines wait too: a step of a 245M student beside three engines took
    16.3 s on both of two cores, and 18.6 s on one. On GPUs they share all cores where they compute
    optimizer steps there, and have one each otherwise.
    """
    train, ranks = config.train, config.train.ranks
    if train.threads != "auto":
        return train.threads
    if device == "cuda":
        return max(cores // ranks, 1) if train.offload == "parameters" else 1
    engines = config.rollout.max_replicas + config.eval.max_replicas
    engines += sum(teacher.max_replicas for teacher in config.teachers.values() if teacher.gpus)
    wanted = max((cores - engines) // ranks, min(2, cores // ranks))
    return max(min(wanted, entries // ENTRIES_OF_A_THREAD), 1)


FULL_GRADIENTS_SHARE = 8
"""By ``train.reduce_gradients: auto``, full gradients take at most one part in so many."""


def reduces_once(train: TrainConfig, entries: int, memory: int) -> bool:
    """Whether ranks with so many bytes reduce gradients of ``entries`` numbers once a step.

    Each then has all of them as float32, 4 bytes an entry, beside its shard, in the backward pass:
    on its GPU, also where ``train.offload`` keeps the shards in host memory to save just that.
    """
    if train.reduce_gradients == "auto":
        return train.offload != "parameters" and 4 * entries <= memory // FULL_GRADIENTS_SHARE
    return train.reduce_gradients == "step"


def resolved(config: RunConfig, device: str) -> RunConfig:
    """The config with the engines' sizes on the device in place of ``auto``.

    ``train.gradient_checkpointing`` stays: the value of ``auto`` depends on the student's layers,
    too.
    """
    from async_opd.config.sections.teachers import EngineTeacher

    def sized(engine: EngineConfig) -> dict[str, EngineConfig]:
        return {"engine": engine.model_copy(update=engine_sizes(engine, device)._asdict())}

    teachers = {
        name: one.model_copy(update=sized(one.engine)) if isinstance(one, EngineTeacher) else one
        for name, one in config.teachers.items()
    }
    return config.model_copy(
        update={
            "rollout": config.rollout.model_copy(update=sized(config.rollout.engine)),
            "teachers": teachers,
        }
    )
