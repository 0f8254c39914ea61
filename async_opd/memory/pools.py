"""Bytes of each pool of a config: of a GPU at its peak, and of host memory, term by term.

    config, sizes of its models ──► train: peak(step_of), engines: weights and KV cache

Where a number is a bound and not a formula, its constant says so.

A load of new weights takes bytes beside an engine's share of its GPU:

    chunk ──clones──► all that is given of a module, unsharded ──► the module, made again
                                                                     └──► as kernels want it

vLLM keeps the tensors that it is given of a module until all of them have come, makes the module
again, and copies that to where the old one is (``vllm.model_executor.model_loader.reload``). Before
the first load it has filled its share with KV cache; its profile knows of no load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from async_opd.config.device_defaults import recomputation, reduces_once
from async_opd.config.precision import Scheme
from async_opd.config.registry import THROUGH_HOST
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import score_kind
from async_opd.config.sections.rollout import RolloutConfig
from async_opd.config.sections.teachers import EngineTeacher
from async_opd.media.engine_prompts import KEPT_BYTES
from async_opd.memory.step import Step, Terms, peak, states
from async_opd.models.adapted import trained_entries
from async_opd.models.engine_args import Device, engine_dtype
from async_opd.models.model_files import is_vision_model
from async_opd.models.model_size import ModelSize, moment_bytes, power_of_two

EVAL = "eval"
"""The pool of engines that only evaluate: the student's, as in ``rollout``."""
GIB = 1 << 30
CONTEXT = GIB
"""Bytes of a process that no allocator counts: CUDA context, loaded kernels, cuBLAS's buffers. A
bound. vLLM's own is not in its share: it exists before vLLM looks at the free memory."""
COMMUNICATOR = GIB // 2
"""Bytes of one communicator of NCCL, which no allocator counts either. A bound."""
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


PADDING = 64
"""vLLM makes rows of embedding and head a multiple of so many, and waits for those that it added:
such a module is complete only when everything has come."""


def reload_bytes(
    size: ModelSize, itemsize: int, parallel: int, chunk: int | None, scheme: Scheme | None = None
) -> int:
    """The peak on each of ``parallel`` GPUs of an engine, for entries of ``itemsize`` bytes.

    Weights come to the GPU in messages of ``chunk`` bytes, or of one larger tensor; None: they come
    through host memory, and the GPU only has the module. With a ``scheme`` the module is quantized
    from its entries, which are there beside until it is.
    """
    table = itemsize * size.vocabulary * size.hidden
    made_of_table, modules = table // parallel, _modules(size, itemsize, parallel)
    if scheme is not None:
        beside = 1 + scheme.nbytes / itemsize
        modules = [(given, int(made * beside)) for given, made in modules]
    if chunk is None:
        return max(made_of_table, *(made for _, made in modules))
    layers = max(map(sum, modules)) + chunk
    packed = chunk if table <= chunk else 0
    if size.vocabulary % PADDING == 0:
        return max(layers, table + made_of_table + packed)
    return itemsize * size.embeddings * size.hidden + max(layers, made_of_table + packed)


def _modules(size: ModelSize, itemsize: int, parallel: int) -> list[tuple[int, int]]:
    """Of the largest modules of a layer the bytes that are given, and those that are made of them.

    Of a mixture's experts, all of which are one module, kernels may want another form beside.
    """
    each = itemsize * size.inner * size.hidden * (2 if size.gated else 1)
    attention = itemsize * (size.query + 2 * size.key) * size.hidden
    found = [(attention, attention // parallel), (each, each // parallel)]
    if size.experts:
        experts = size.experts * (each + itemsize * size.inner * size.hidden)
        found.append((experts, 2 * experts // parallel))
    return found


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
    names = ["train", "rollout", *([EVAL] if config.eval.min_replicas else [])]
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
    still = frozen_entries(config, size)
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
        mask=train.attention == "sdpa" or (train.compile is True and device == "cpu"),
        trained=trained,
        still=still,
        vision_frozen=size.tower is not None and still == size.tower.entries,
        moment_bytes=moment_bytes(train.moments, SAMPLE) / math.prod(SAMPLE),
        teacher_vocabulary=max(columns, default=0),
        on_host=ON_HOST[train.offload] if device == "cuda" else frozenset(),
        reduces_once=train.ranks > 1 and reduces_once(train, entries, memory),
        kept=_heads(config, machine) | _recorded(config),
    )


def frozen_entries(config: RunConfig, size: ModelSize) -> int:
    """Entries of the vision parts that ``train.freeze`` names."""
    if size.tower is None:
        return 0
    of = {
        "projector": size.tower.projector,
        "vision_tower": size.tower.entries - size.tower.projector,
    }
    return sum(of[part] for part in set(config.train.freeze))


def _row_tokens(config: RunConfig, device: Device) -> int:
    """A rank's tokens of the longest row: the budget, a longer sample, but no more than a batch."""
    longest = config.response_tokens + config.context_tokens + (config.data.max_prompt_tokens or 0)
    budget = config.train.tokens_per_micro_batch
    if device == "cpu":
        budget = min(budget, CPU_ROW_TOKENS)
    tokens = max(longest, min(budget, config.train.batch_size * longest))
    return -(-tokens // config.train.context_parallel)


def resting(config: RunConfig, machine: Machine) -> Terms:
    """A rank's memory on its GPU between two steps; beside colocated engines it is offloaded."""
    kept = _heads(config, machine) | outside(config, "train", machine)
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


def _tensors_sent(size: ModelSize) -> dict[int, int]:
    """Entries of a tensor in a weight sync, and how many such tensors there are.

    All experts of a layer are two tensors (``weight_sync.layout.experts_together``).
    """
    sent, matrix, beside = dict(size.numels), size.inner * size.hidden, 2 if size.gated else 1
    layers = sent.get(matrix, 0) // (size.experts * (beside + 1)) if size.experts else 0
    if layers:
        sent[matrix] -= layers * size.experts * (beside + 1)
        for together in (beside * size.experts * matrix, size.experts * matrix):
            sent[together] = sent.get(together, 0) + layers
    return sent


def _pinned(config: RunConfig, size: ModelSize, nbytes: int) -> int:
    """Host memory of a snapshot: pinned chunks and larger tensors, up to powers of two each.

    Larger tensors of a layer end the chunk before them.
    """
    chunk = config.sync.chunk_mib << 20
    itemsize = 4 if engine_dtype(config.rollout.engine, "cuda") == "float32" else 2
    sent = _tensors_sent(size).items()
    large = {itemsize * n: count for n, count in sent if itemsize * n > chunk}
    ends = size.layers if any(count >= size.layers for count in large.values()) else 0
    rest = max(nbytes - sum(n * count for n, count in large.items()), 0) + ends * chunk
    large_ = sum(power_of_two(n) * count for n, count in large.items())
    return large_ + rest * power_of_two(chunk) // chunk


PIECE = 1 << 30
"""``trainer.saving.state.BUFFER_BYTES``."""


def kept_copies(size: ModelSize, nbytes: int, shards: int) -> int:
    """Bound of the pinned memory of copies for a checkpoint, ``nbytes`` of float32 tensors.

    A tensor larger than a piece takes a power of two, and ends the piece before; the end of a piece
    that the next one does not fit stays empty.
    """
    parts = [(4 * -(-numel // shards), count) for numel, count in size.numels]
    whole = sum(part * count for part, count in parts)
    if not whole or not nbytes:
        return nbytes
    large = sum(part * count for part, count in parts if part > PIECE)
    rounded = sum((power_of_two(part) + PIECE) * count for part, count in parts if part > PIECE)
    widest = max((part for part, _ in parts if part <= PIECE), default=0)
    small = (whole - large) * PIECE // max(PIECE - widest, PIECE // 2)
    return (rounded + small) * nbytes // whole + power_of_two(min(PIECE, nbytes))


def _received(config: RunConfig, machine: Machine) -> Terms:
    """Bytes that a worker of a student's engine has received in host memory, and not loaded yet.

    On a CPU all that is sent. On a GPU one chunk or larger tensor, the copies of its tensors, and
    tensors before it of a layer that is not complete: a bound. NCCL sends to GPUs; shared memory is
    the trainer's, and only copies are a worker's.
    """
    backend, device = config.sync_backend, machine.device
    if device == "cuda" and backend not in THROUGH_HOST:
        return {}
    step, chunk = step_of(config, machine), config.sync.chunk_mib << 20
    sent = _snapshot(config, step, device)
    dtype = engine_dtype(config.rollout.engine, device)
    itemsize = 4 if dtype == "float32" else 2
    copies = chunk + step.size.block * itemsize
    if backend == "shared_memory":
        return {"received weights": min(sent, copies)}
    if device == "cpu":
        return {"received weights": sent}
    largest = itemsize * max(_tensors_sent(step.size), default=0)
    held = max(chunk, step.size.head_bytes(dtype), largest) + copies
    return {"received weights": min(sent + chunk, held)}


def _recorded(config: RunConfig) -> Terms:
    """Records of ``log.microscope`` of a step's tokens until its end, float64.

    Of each token at most 13 numbers and five for each of the ``top_k`` (``trainer.recorder``).
    """
    settings = config.log.microscope
    if not settings.share:
        return {}
    tokens = config.train.batch_size * config.response_tokens * settings.share
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
    if is_vision_model(config.student.model):
        host["image cache"] = config.data.image_cache_mib << 20
    sent = _snapshot(config, step, machine.device)
    first = {"snapshot": sent}
    if config.sync_backend == "shared_memory":
        first["shared weights"] = sent
    if machine.device == "cpu":
        return PoolMemory("train", ranks, {}, terms | host, first)
    first["snapshot"] = _pinned(config, step.size, sent)
    host["checkpoint"] = kept_copies(step.size, copied, ranks // step.copies)
    away, exact = step.on_host, frozenset[str]()
    if config.rollout.host == "train":  # between two steps: no gradients exist
        away = frozenset({"parameters", "moments"})
    elif config.train.offload == "parameters":
        exact = frozenset({"moments"})
    factor = step.size.pinned(ranks // step.copies)
    host |= {
        term: nbytes if term in exact else int(nbytes * factor)
        for term, nbytes in state.items()
        if term in away
    }
    return PoolMemory("train", ranks, terms | outside(config, "train", machine), host, first)


def _engine(config: RunConfig, name: str, machine: Machine) -> PoolMemory:
    """Each of an engine's GPUs has a shard of its weights, its host while the engine sleeps.

    Images are kept once for all GPUs of an engine. On GPUs a pool has the engines that it needs to
    start, on CPUs the most that it may have.
    """
    pool, model = engine_section(config, name)
    parallel = pool.tensor_parallel
    dtype, scheme = engine_dtype(pool.engine, machine.device), pool.engine.scheme
    weights = machine.sizes(model).engine_bytes(dtype, scheme)
    host = {"process": ENGINE_PROCESS}
    if is_vision_model(model):
        host["image cache"] = ((config.data.image_cache_mib << 20) + KEPT_BYTES) // parallel
    if name in ("rollout", EVAL):
        host |= _received(config, machine)
    if name == "rollout" and config.cluster.trainer_recovery == "replica":
        size = machine.sizes(model)
        sent = replace(size, numels=tuple(_tensors_sent(size).items()))
        kept = weights if machine.device == "cpu" else int(weights * sent.pinned())
        host["weights for the trainer"] = kept // parallel  # the first worker has all of them
    if machine.device == "cpu":
        host |= {"weights": weights, "KV cache": pool.engine.cpu_kv_cache_mib << 20}
        return PoolMemory(name, pool.max_replicas, {}, host)
    terms = {"weights": weights // parallel, "least KV cache": LEAST}
    terms |= outside(config, name, machine)
    hosts = {teacher.host for teacher in config.teachers.values()}
    if pool.host is not None or name in hosts:
        host["weights asleep"] = int(weights * machine.sizes(model).pinned(parallel)) // parallel
    return PoolMemory(name, pool.min_replicas * parallel, terms, host)


def outside(config: RunConfig, name: str, machine: Machine) -> Terms:
    """Bytes that a process has on its GPU beside its tensors; of an engine, beside its share."""
    found = {"CUDA context": CONTEXT}
    if several := communicators(config, name, machine):
        found["NCCL communicators"] = COMMUNICATOR * several
    if name != "train" and (load := _load(config, name, machine)):
        found["weight load"] = load
    return found


def communicators(config: RunConfig, name: str, machine: Machine) -> int:
    """The most communicators of NCCL that a process of a pool on GPUs has.

    Of all ranks, of the copies and of the shards, and of those that share rows; of an engine's
    workers, and once more for experts. One for each group of a weight sync: rank 0 has all of them,
    and each replica that only evaluates is a group.
    """
    synced = config.sync_backend not in THROUGH_HOST
    if name == "train":
        train = config.train
        groups = config.rollout.max_replicas if config.sync.rolling else 1
        groups += config.eval.max_replicas
        among = 1 + 2 * (train.replicate > 1) + (train.context_parallel > 1)
        return among * (train.ranks > 1) + groups * synced
    pool, model = engine_section(config, name)
    several = synced and name in ("rollout", EVAL)
    if pool.tensor_parallel == 1:
        return int(several)
    return 1 + (machine.sizes(model).experts > 0) + several


def _load(config: RunConfig, name: str, machine: Machine) -> int:
    """Bytes of a load of new weights: of the student's engines, and of teachers that follow it."""
    teacher = None if name in ("rollout", EVAL) else name.removeprefix("teachers.")
    if teacher is not None and teacher not in config.refreshes:
        return 0
    pool, model = engine_section(config, name)
    size, dtype = machine.sizes(model), engine_dtype(pool.engine, machine.device)
    itemsize, on_gpu = (4 if dtype == "float32" else 2), config.sync_backend not in THROUGH_HOST
    scheme = pool.engine.scheme
    if teacher is not None:
        return reload_bytes(size, itemsize, pool.tensor_parallel, None, scheme)
    lora = config.train.lora
    if lora is not None and lora.sync == "adapter":  # buffers, and their tensors
        return 2 * _snapshot(config, step_of(config, machine), machine.device) if on_gpu else 0
    chunk = config.sync.chunk_mib << 20 if on_gpu else None
    return reload_bytes(size, itemsize, pool.tensor_parallel, chunk, scheme)


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
    return nbytes // max(sum(bytes_of_a_token(config, name, machine)), 1)


def bytes_of_a_token(config: RunConfig, name: str, machine: Machine) -> list[int]:
    """Bytes of a token's keys and values in each layer, on each GPU of an engine."""
    pool, model = engine_section(config, name)
    itemsize = pool.engine.cache_itemsize(engine_dtype(pool.engine, machine.device))
    numbers = cached_numbers(machine.sizes(model), pool.tensor_parallel)
    return [itemsize * each for each in numbers]


def cached_numbers(size: ModelSize, parallel: int) -> list[int]:
    """The numbers that each layer keeps of a token on each GPU of an engine."""
    width = max(size.query // size.heads, 1)
    caches = size.caches or ((size.key // width, 2 * width),) * size.layers
    return [max(heads // parallel, 1) * numbers for heads, numbers in caches]
