"""How much of a GPU each engine may take: whatever else lies on the same GPU is counted.

    ┌──────────── a GPU ────────────┐
    │ what works now                │  an engine: gpu_memory_utilization · total
    │ its CUDA context              │
    │ all others on this GPU, asleep│  engines: ASLEEP each; a trainer: weights and optimizer
    └───────────────────────────────┘

A trainer whose rollout engines are on its GPUs is offloaded while they work: it keeps its context,
and the heads of teachers. One process of each works at a time (``teachers.time_sharing``). The
bytes of contexts and sleeping engines are bounds, not measurements. vLLM compares an engine's share
with the memory that is free when it starts (``vllm.v1.worker.utils.request_memory``), and fills it
with KV cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from async_opd.checks.gpu_plan import table
from async_opd.checks.resources import guests_of, pools
from async_opd.config.device_defaults import recomputation
from async_opd.config.loss import score_kind
from async_opd.config.run_config import RolloutConfig, RunConfig
from async_opd.config.teachers import EngineTeacher
from async_opd.models.engine_args import engine_dtype, share_left
from async_opd.models.model_size import ModelSize

GIB = 1 << 30
CONTEXT = GIB
"""Bytes of a process that no allocator counts: CUDA context, loaded kernels, buffers of NCCL and
cuBLAS. vLLM's own is not in its share: it exists before vLLM looks at the free memory."""
ASLEEP = 2 * GIB
"""Bytes of an engine at sleep level 1: its weights, its CUDA graphs' buffers and its KV cache are
gone from the GPU (``CuMemBackend.suspend``); its context and the graphs themselves stay."""
LEAST = GIB
"""Bytes of KV cache and activations without which an engine is of no use."""
STATES, RESTING = 16, 12
"""The trainer's bytes for each parameter: float32 weights, gradients and AdamW's two moments; and
between two steps, without gradients."""
CHUNK = 2 * GIB
"""Bytes of a chunk of logits and what the objective makes of it (``trainer.losses.chunked``)."""

Sizes = Callable[[str], ModelSize]
"""The size of a local model by its directory."""


@dataclass(frozen=True)
class Tenant:
    """A pool on a GPU: ``works`` bytes at least while it works, ``rests`` while others do.

    ``fixed`` is an engine's configured share, None for ``auto`` and for the trainer.
    """

    name: str
    works: int
    rests: int
    fixed: float | None = None

    @property
    def key(self) -> str:
        """The config key of its share; the trainer has none."""
        return "train" if self.name == "train" else f"{self.name}.engine.gpu_memory_utilization"


def beside(config: RunConfig, pool: str, sizes: Sizes = ModelSize.read) -> int:
    """Bytes of each of the pool's GPUs that are not its engine's to take.

    They are its own context, and what all others keep there while it works.
    """
    host = _host(config, pool)
    rests = (ASLEEP for name in guests_of(config, host) if name != pool)
    resting = 0 if host == pool else _rests(config, host, sizes)
    return CONTEXT + resting + sum(rests)


def faults(
    config: RunConfig, total: int, sizes: Sizes = ModelSize.read
) -> Iterator[tuple[str, str, str]]:
    """What cannot fit GPUs of ``total`` bytes that several pools share: (key, fault, remedy)."""
    for host in sorted({pool.shares for pool in pools(config) if pool.shares}):
        tenants = _tenants(config, host, sizes)
        for tenant in tenants:
            rest = sum(other.rests for other in tenants if other is not tenant)
            fault = _fault(tenant, total, rest)
            if fault:
                yield tenant.key, f"{fault}\n{_shown(tenants, total)}", REMEDY


def notes(config: RunConfig, total: int, sizes: Sizes = ModelSize.read) -> Iterator[str]:
    """A note if a rank on a GPU of its own may need more than ``total`` bytes. It is no fault.

    The bytes of activations are a bound.
    """
    works = _works(config, sizes)
    if works > total and not guests_of(config, "train"):
        needed, has = (f"{nbytes / GIB:.1f}" for nbytes in (works, total))
        yield (
            f"train: a rank may need {needed} GiB in a step, and its GPU has {has}: more "
            "train.ranks, a smaller train.tokens_per_micro_batch or "
            "train.gradient_checkpointing need less"
        )


REMEDY = "set gpu_memory_utilization to auto, take fewer teachers on these GPUs, or more GPUs"


def _fault(tenant: Tenant, total: int, rest: int) -> str:
    """Why the tenant cannot work beside ``rest`` bytes of others; empty if it can."""
    left = share_left(total, CONTEXT + rest)
    if tenant.fixed is not None and tenant.fixed * total > total - CONTEXT - rest:
        return f"found {tenant.fixed:g}, of a GPU that has at most {left:g} beside the others on it"
    taken = total - rest
    if tenant.name != "train":
        taken = int((left if tenant.fixed is None else tenant.fixed) * total) + CONTEXT
    if tenant.works > taken:
        needs, has = (f"{bytes_ / GIB:.1f}" for bytes_ in (tenant.works, max(taken, 0)))
        return f"{tenant.name} needs {needs} GiB of a GPU while it works, and gets {has}"
    return ""


def _shown(tenants: Sequence[Tenant], total: int) -> str:
    rows = [
        (t.name, f"{t.works / GIB:.1f}", f"{t.rests / GIB:.1f}", f"{t.fixed or 'auto'}")
        for t in tenants
    ]
    head = f"GiB of the GPU's {total / GIB:.1f}"
    return "\n".join(table([(head, "works with", "rests with", "share"), *rows]))


def _tenants(config: RunConfig, host: str, sizes: Sizes) -> list[Tenant]:
    """The host, and its guests."""
    engines = [*([host] if host == "rollout" else []), *guests_of(config, host)]
    trainer = [Tenant("train", _works(config, sizes), _rests(config, "train", sizes))]
    return [*(trainer if host == "train" else []), *(_engine(config, n, sizes) for n in engines)]


def _engine(config: RunConfig, name: str, sizes: Sizes) -> Tenant:
    pool: RolloutConfig | EngineTeacher = config.rollout
    model = config.student.model
    if name != "rollout":
        teacher = config.teachers[name.removeprefix("teachers.")]
        assert isinstance(teacher, EngineTeacher)
        pool, model = teacher, config.teacher_model(name.removeprefix("teachers."))
    dtype, share = engine_dtype(pool.engine, "cuda"), pool.engine.gpu_memory_utilization
    works = sizes(model).engine_bytes(dtype) // pool.tensor_parallel + LEAST + CONTEXT
    return Tenant(name, works, ASLEEP, None if share == "auto" else share)


def _rests(config: RunConfig, host: str, sizes: Sizes) -> int:
    """Bytes that a host keeps on its GPUs while its teachers work."""
    if host != "train":
        return ASLEEP
    kept = CONTEXT + _heads(config, sizes)
    if config.rollout.host == "train":
        return kept  # all else is offloaded
    size = sizes(config.student.model)
    return kept + RESTING * size.floats // config.train.shards + _copy(config, size)


def _copy(config: RunConfig, size: ModelSize) -> int:
    """Bytes of the weights that rank 0 sends, until the next ones.

    For colocated engines they are in host memory.
    """
    if config.rollout.host == "train":
        return 0
    return size.engine_bytes(engine_dtype(config.rollout.engine, "cuda"))


def _heads(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of the teachers' heads, which every rank keeps for ``support: full_vocab``."""
    if score_kind(config.loss) != "hidden":
        return 0
    heads = {
        (config.teacher_model(name), engine_dtype(teacher.engine, "cuda"))
        for name, teacher in config.teachers.items()
        if isinstance(teacher, EngineTeacher)
    }
    return sum(sizes(model).head_bytes(dtype) for model, dtype in heads)


def _works(config: RunConfig, sizes: Sizes) -> int:
    """Bytes of a rank in a step, which has the copy of the weights that is being sent."""
    size, train = sizes(config.student.model), config.train
    half = train.dtype != "float32"
    autocast = 2 * size.floats if half and train.ranks == 1 else 0
    states = STATES * size.floats // train.shards + _copy(config, size)
    kept = states + autocast + _heads(config, sizes)
    return CONTEXT + kept + CHUNK + _activations(config, size, 2 if half else 4)


def _activations(config: RunConfig, size: ModelSize, itemsize: int) -> int:
    """Bytes of a micro-batch's activations: of every layer, or of one and all layers' inputs.

    A layer keeps about 6 values of the hidden and 3 of the inner width for each token: for a 4B
    student of 36 layers and 16,384 tokens 53 GB, where 46 GB were measured.
    """
    train = config.train
    layer = (6 * size.hidden + 3 * size.inner) * itemsize
    kept = {"none": layer, "selective": 5 * size.hidden * itemsize + 2 * size.inner * itemsize}
    each = kept.get(recomputation(train, "cuda"), size.hidden * itemsize)
    whole = layer + size.layers * each
    return whole * train.row_tokens_of_rank


def _host(config: RunConfig, pool: str) -> str:
    """The pool whose GPUs a pool has: its own, or its host's."""
    return next((one.shares for one in pools(config) if one.name == pool), None) or pool
