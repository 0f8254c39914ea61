"""Bytes of each pool of a config: of a GPU at its peak, and of host memory, term by term.

    config, sizes of its models ──► train: peak(step_of), engines: weights and KV cache

Where a number is a bound and no formula, its constant says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from async_opd.config.device_defaults import recomputation, reduces_once
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import score_kind
from async_opd.config.sections.rollout import RolloutConfig
from async_opd.config.sections.teachers import EngineTeacher
from async_opd.media.engine_prompts import KEPT_BYTES
from async_opd.memory.step import Step, Terms, peak, states
from async_opd.models.adapted import trained_entries
from async_opd.models.engine_args import Device, engine_dtype
from async_opd.models.model_files import sees
from async_opd.models.model_size import ModelSize
from async_opd.models.moments import moment_bytes

EVAL = "eval"
"""The pool of engines that only evaluate: the student's, as in ``rollout``."""
GIB = 1 << 30
CONTEXT = GIB
"""Bytes of a process that no allocator counts: CUDA context, loaded kernels, communicators of NCCL,
cuBLAS's buffers. A bound. vLLM's own is not in its share: it exists before vLLM looks at the free
memory."""
LEAST = GIB
"""Bytes of KV cache and activations without which an engine is of no use. A bound."""
SAMPLE = (4096, 256)
"""A matrix, by which the moments of all are counted."""
CPU_ROW_TOKENS = 512
"""Longest packed row of short samples on a CPU (``trainer.learner``)."""
RANK_PROCESS, ENGINE_PROCESS = 5 * GIB // 8, 5 * GIB // 4
"""Host memory of a process's code: torch and transformers; vLLM. Bounds of what CPU runs have."""

ON_HOST = {
    "none": frozenset[str](),
    "moments": frozenset({"moments"}),
    "parameters": frozenset({"parameters", "gradients", "moments"}),
}
"""Terms that ``train.offload`` keeps in host memory."""

Sizes = Callable[[str], ModelSize]
"""The size of a local model by its directory."""


@dataclass(frozen=True)
class Machine:
    """Where a run is: its device, bytes of each GPU (of the host for CPUs) if they are known.

    ``host`` are the bytes beside GPUs, ``gpus`` their number; None where a run joins a cluster.
    """

    device: Device
    total: int | None = None
    sizes: Sizes = ModelSize.of_weights
    host: int | None = None
    gpus: int | None = None


@dataclass(frozen=True)
class PoolMemory:
    """A pool of ``processes``: bytes of each one's GPU, and of its part of the host's memory.

    ``first`` is what the first process has in host memory beside.
    """

    name: str
    processes: int
    gpu: Terms
    host: Terms
    first: Terms = field(default_factory=dict)


def pool_memory(config: RunConfig, machine: Machine) -> list[PoolMemory]:
    """All pools that the run has on its own machines. ModelError for a model that is not local."""
    names = ["train", "rollout", *([EVAL] if config.eval.replicas else [])]
    names += [f"teachers.{name}" for name, t in config.teachers.items() if t.gpus]
    return [memory_of(config, name, machine) for name in names]


def memory_of(config: RunConfig, name: str, machine: Machine) -> PoolMemory:
    """One pool, by its name: that of its config section, or ``EVAL``."""
    return _trainer(config, machine) if name == "train" else _engine(config, name, machine)


def step_of(config: RunConfig, machine: Machine) -> Step:
    """The largest step of a rank."""
    train, device = config.train, machine.device
    size = machine.sizes(config.student.model)
    wanted = recomputation(train, device)
    if train.gradient_checkpointing == "auto" and not size.recomputable:
        wanted = "none"
    trained = trained_entries(config.student.model, train.lora) if train.lora else None
    still = _still(config, size)
    entries, memory = size.floats - still if trained is None else trained, machine.total or 0
    teachers = config.teachers if score_kind(config.loss) == "hidden" else ()
    columns = (machine.sizes(config.teacher_model(name)).vocabulary for name in teachers)
    tokens = _row_tokens(config, device)
    return Step(
        size,
        device,
        ranks=train.ranks,
        copies=train.replicate,
        tokens=tokens,
        responses=tokens,
        half=train.dtype == "bfloat16" or (train.dtype == "auto" and device == "cuda"),
        recompute=wanted,
        mask=train.attention == "sdpa" or (train.compile and device == "cpu"),
        trained=trained,
        still=still,
        sees_still=size.tower is not None and still == size.tower.entries,
        moment_bytes=moment_bytes(train.moments, SAMPLE) / math.prod(SAMPLE),
        teacher_vocabulary=max(columns, default=0),
        on_host=ON_HOST[train.offload] if device == "cuda" else frozenset(),
        reduces_once=train.ranks > 1 and reduces_once(train, entries, memory),
        kept=_heads(config, machine) | _recorded(config),
    )


def _still(config: RunConfig, size: ModelSize) -> int:
    """Entries of what sees that ``train.freeze`` names."""
    if size.tower is None:
        return 0
    of = {
        "projector": size.tower.projector,
        "vision_tower": size.tower.entries - size.tower.projector,
    }
    return sum(of[part] for part in set(config.train.freeze))


def _row_tokens(config: RunConfig, device: Device) -> int:
    """A rank's tokens of the longest row: the budget, a longer sample, but no more than a batch."""
    longest = config.rollout.max_tokens + (config.data.max_prompt_tokens or 0)
    budget = config.train.tokens_per_micro_batch
    if device == "cpu":
        budget = min(budget, CPU_ROW_TOKENS)
    tokens = max(longest, min(budget, config.train.batch_size * longest))
    return -(-tokens // config.train.context_parallel)


def resting(config: RunConfig, machine: Machine) -> Terms:
    """What a rank keeps on its GPU between two steps; beside colocated engines it is offloaded."""
    kept = _heads(config, machine) | {"CUDA context": CONTEXT}
    if config.rollout.host == "train":
        return kept
    step = step_of(config, machine)
    return states(replace(step, on_host=step.on_host | {"gradients"}, reduces_once=False)) | kept


def _snapshot(config: RunConfig, step: Step, device: Device) -> int:
    """The weights that rank 0 sends, in host memory."""
    lora = config.train.lora
    if lora is not None and lora.sync == "adapter":
        return (step.trained or 0) * 4
    sent = replace(step.size, floats=step.size.floats - step.still)
    return sent.engine_bytes(engine_dtype(config.rollout.engine, device))


def _received(config: RunConfig, machine: Machine) -> Terms:
    """What a worker of a student's engine has received in host memory, and not loaded yet.

    On a CPU all that is sent. On a GPU one chunk, the copies of its tensors, and tensors before it
    of a layer that is not complete: a bound. NCCL sends to GPUs; shared memory is the trainer's,
    and only copies are a worker's.
    """
    backend, device = config.sync_backend, machine.device
    if device == "cuda" and backend in ("nccl", "auto"):
        return {}
    step, chunk = step_of(config, machine), config.sync.chunk_mib << 20
    sent = _snapshot(config, step, device)
    dtype = engine_dtype(config.rollout.engine, device)
    copies = chunk + step.size.block * (4 if dtype == "float32" else 2)
    if backend == "shared_memory":
        return {"received weights": min(sent, copies)}
    if device == "cpu":
        return {"received weights": sent}
    held = max(chunk, step.size.head_bytes(dtype)) + copies
    return {"received weights": min(sent + chunk, held)}


def _recorded(config: RunConfig) -> Terms:
    """What ``log.microscope`` keeps of a step's tokens until its end, float64.

    Of each token at most 13 numbers and five for each of the ``top_k`` (``trainer.recording``).
    """
    settings = config.log.microscope
    if not settings.share:
        return {}
    tokens = config.train.batch_size * config.rollout.max_tokens * settings.share
    numbers = 13 + 5 * settings.top_k
    return {"recorded tokens": int(8 * numbers * tokens) // config.train.ranks}


def _heads(config: RunConfig, machine: Machine) -> Terms:
    """The teachers' heads, which every rank has for objectives over the whole vocabulary."""
    if score_kind(config.loss) != "hidden":
        return {}
    heads = {
        (config.teacher_model(name), engine_dtype(teacher.engine, machine.device))
        for name, teacher in config.teachers.items()
        if isinstance(teacher, EngineTeacher)
    }
    sizes = [machine.sizes(model).head_bytes(dtype) for model, dtype in heads]
    return {"teachers' heads": sum(sizes)}


def _trainer(config: RunConfig, machine: Machine) -> PoolMemory:
    """Host memory of a rank has its part of a checkpoint, a copy of what is trained.

    The first rank has the snapshot, and its copy that engines on this machine map.
    """
    step = step_of(config, machine)
    terms, ranks = peak(step), config.train.ranks
    state = states(replace(step, kept={}, on_host=frozenset(), reduces_once=False))
    trained = step.size.floats - step.still if step.trained is None else step.trained
    copied = 4 * trained * step.copies // ranks + state["moments"]
    host = {"process": RANK_PROCESS, "checkpoint": copied}
    if sees(config.student.model):
        host["image cache"] = config.data.image_cache_mib << 20
    first = {"snapshot": _snapshot(config, step, machine.device)}
    if config.sync_backend == "shared_memory":
        first["shared weights"] = first["snapshot"]
    away = ON_HOST["parameters"] if config.rollout.host == "train" else step.on_host
    if machine.device == "cuda":
        host |= {term: nbytes for term, nbytes in state.items() if term in away}
    if machine.device == "cpu":
        return PoolMemory("train", ranks, {}, terms | host, first)
    return PoolMemory("train", ranks, terms | {"CUDA context": CONTEXT}, host, first)


def _engine(config: RunConfig, name: str, machine: Machine) -> PoolMemory:
    """Each of an engine's GPUs has a shard of its weights, its host while the engine sleeps.

    Images are kept once for all GPUs of an engine.
    """
    pool, model = engine_section(config, name)
    parallel = pool.tensor_parallel
    weights = machine.sizes(model).engine_bytes(engine_dtype(pool.engine, machine.device))
    host = {"process": ENGINE_PROCESS}
    if sees(model):
        host["image cache"] = ((config.data.image_cache_mib << 20) + KEPT_BYTES) // parallel
    if name in ("rollout", EVAL):
        host |= _received(config, machine)
    if machine.device == "cpu":
        host |= {"weights": weights, "KV cache": pool.engine.cpu_kv_cache_mib << 20}
        return PoolMemory(name, pool.replicas, {}, host)
    terms = {"weights": weights // parallel, "least KV cache": LEAST, "CUDA context": CONTEXT}
    hosts = {teacher.host for teacher in config.teachers.values()}
    if pool.host is not None or name in hosts:
        host["weights asleep"] = weights // parallel
    return PoolMemory(name, pool.replicas * parallel, terms, host)


def engine_section(config: RunConfig, name: str) -> tuple[RolloutConfig | EngineTeacher, str]:
    """The section of a pool of engines, and their model."""
    if name == "rollout":
        return config.rollout, config.student.model
    if name == EVAL:
        own = {"replicas": config.eval.replicas, "placement": "dedicated", "with_": None}
        return config.rollout.model_copy(update=own), config.student.model
    teacher = config.teachers[name.removeprefix("teachers.")]
    assert isinstance(teacher, EngineTeacher)
    return teacher, config.teacher_model(name.removeprefix("teachers."))


def cache_tokens(config: RunConfig, name: str, machine: Machine, nbytes: int) -> int:
    """Tokens whose keys and values fit into ``nbytes`` on each GPU of an engine."""
    pool, model = engine_section(config, name)
    size = machine.sizes(model)
    itemsize = 4 if engine_dtype(pool.engine, machine.device) == "float32" else 2
    return nbytes // max(itemsize * sum(cached_numbers(size, pool.tensor_parallel)), 1)


def cached_numbers(size: ModelSize, parallel: int) -> list[int]:
    """The numbers that each layer keeps of a token on each GPU of an engine."""
    width = max(size.query // size.heads, 1)
    caches = size.caches or ((size.key // width, 2 * width),) * size.layers
    return [max(heads // parallel, 1) * numbers for heads, numbers in caches]
