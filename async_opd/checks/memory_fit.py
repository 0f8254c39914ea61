"""Whether each pool fits its GPUs, and all the host's memory; which config key helps most.

async_opd.memory: bytes by term ──► fault with all terms, the largest first
                               └──► changes of the config, each with the bytes that it leads to
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Set
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from async_opd.checks.gpu_memory import beside, faults, host_of, share_of
from async_opd.checks.resources import gpu_bytes, guests_of, pools, section_of
from async_opd.config.device_defaults import resolved
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import Findings
from async_opd.memory.defaults import (
    cache_bytes,
    needed_tokens,
    with_compiled_layers,
    with_lengths,
    with_recomputation,
)
from async_opd.memory.pools import (
    EVAL,
    GIB,
    LEAST,
    Machine,
    PoolMemory,
    cache_tokens,
    memory_of,
    outside,
)
from async_opd.memory.pools import pool_memory as pools_of
from async_opd.memory.step import Terms
from async_opd.models.engine_args import Device, share_left
from async_opd.models.model_files import ModelError, is_hub_id
from async_opd.models.rope import max_model_len

NEAR = 0.9
"""A rank that needs more than this share of a GPU is noted: a plan may be wrong by a tenth."""
MOST_RANKS = 1024
"""Ranks that are tried for a student that does not fit."""
SMALLER = "a smaller model, or more memory"

Problem = tuple[str, str, str]
"""Config key, fault, remedy."""


@dataclass(frozen=True)
class _Fault:
    """``pool`` needs more bytes of ``where`` than there are; on a host all pools together do."""

    pool: str
    where: str
    needed: int
    text: str

    @property
    def place(self) -> tuple[str, str]:
        """The memory that is too small: of a pool's GPUs, or of the host."""
        return self.where, self.pool if self.where == "GPU" else ""


def this_machine(config: RunConfig, device: Device, gpus: int | None = None) -> Machine:
    """Of this machine, or of GPUs as the config says; ``gpus`` that this machine has, if known.

    Where it has none, its host memory says nothing about the run's.
    """
    if device == "cpu":
        return Machine(device, _host_bytes())
    known = gpus if gpus and not config.cluster.joins else None
    return Machine(device, gpu_bytes(config), host=_host_bytes() if known else None, gpus=known)


def check_memory(
    config: RunConfig, found: Findings, partial: Set[str], device: Device, gpus: int
) -> None:
    """Checks that every pool fits its GPUs, or the host, as far as their memory is known.

    Nothing is checked beside other problems, or while files of models are missing (``partial``).
    """
    if found.problems or partial or (device == "cpu" and config.cluster.joins):
        return
    machine = this_machine(config, device, gpus)
    try:
        problems = [*faults_of_memory(config, machine), *faults_of_cache(config, machine)]
    except ModelError as error:  # its weights: its other files are checked
        keys = {"student.model": config.student.model} | {
            f"teachers.{name}.model": config.teacher_model(name) for name in config.teachers
        }
        key = next((key for key, model in keys.items() if model in error.message), "student.model")
        if is_hub_id(keys[key]):  # it is downloaded when the run starts
            return
        found.add(key, error.message, error.remedy)
        return
    for problem in problems:
        found.add(*problem)
    if device == "cuda" and machine.total is not None:
        found.notes.extend(near(config, machine))
        for problem in faults(config, machine.total):
            found.add(*problem)


def faults_of_memory(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Pools that need more than there is; nothing where that is not known."""
    for fault in list(_faults(config, machine)):
        yield fault.pool, fault.text, _remedy(config, fault, machine)


def faults_of_cache(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Engines whose KV cache holds less than one of their longest sequences: vLLM refuses them.

    Only what fits otherwise, and whose sequences and memory are known.
    """
    given, config = config, with_lengths(config)
    for pool in pools_of(config, machine):
        if pool.name in ("train", EVAL):
            continue
        tokens, needed = cache_bytes(config, pool.name, machine)
        left = _section(config, pool.name).engine.cpu_kv_cache_mib << 20
        if machine.device == "cuda":
            room = _room(config, pool.name, machine) if machine.total else sys.maxsize
            left = room - sum(pool.gpu.values()) + LEAST
            left = left if left >= LEAST else sys.maxsize  # another fault
        if needed > left:
            fault = f"a sequence of max_model_len {tokens} has {in_gib(needed)} of keys and values"
            fault += f"; the engine's KV cache has {in_gib(left)}"
            key = f"{section_of(pool.name)}.engine.max_model_len"
            yield key, fault, _shorter(given, config, pool.name, machine)


def _shorter(given: RunConfig, sized: RunConfig, name: str, machine: Machine) -> str:
    """How an engine's longest sequence fits its KV cache; ``sized`` has the lengths by default."""
    more = "raise engine.cpu_kv_cache_mib" if machine.device == "cpu" else "raise tensor_parallel"
    if max_model_len(_section(given, name).engine):
        return f"lower it, or {more}"
    if max_model_len(_section(sized, name).engine):
        return f"lower data.max_prompt_tokens or rollout.max_tokens, or {more}"
    if needed_tokens(given) is None:
        return f"set data.max_prompt_tokens, which bounds max_model_len too, or {more}"
    return f"set it to its longest prompt with its response, or {more}"


def with_defaults(config: RunConfig, device: Device) -> RunConfig:
    """The config with all defaults that depend on device, models and memory."""
    machine = this_machine(config, device)
    config = resolved(with_lengths(config), device)
    try:
        config = with_compiled_layers(config, machine)
        return with_recomputation(config, machine, beside(config, "train", machine.sizes))
    except ModelError:  # its weights are not on this machine
        return config


def near(config: RunConfig, machine: Machine) -> Iterator[str]:
    """Notes of GPUs that hold what is planned, but only just.

    A rank leaves less than a tenth of one, or an engine's configured share less than it needs
    beside: then its start succeeds, and the first load of weights may not.
    """
    terms, total = memory_of(config, "train", machine).gpu, machine.total or 0
    if NEAR * total < sum(terms.values()) <= total and not guests_of(config, "train"):
        yield f"train: a rank needs {_needs(terms)}; its GPU has {in_gib(total)}"
    for pool in pools(config):
        alone = not (pool.shares or guests_of(config, pool.name))
        if pool.name in ("train", EVAL) or not (pool.gpus and alone):
            continue
        share, terms = share_of(config, pool.name), outside(config, pool.name, machine)
        if share is not None and sum(terms.values()) > total - int(share * total):
            left = in_gib(total - int(share * total))
            yield (
                f"{pool.name}.engine.gpu_memory_utilization: {share:g} of its GPU leaves {left}, "
                f"and outside of its share an engine needs {_needs(terms)}"
            )


def fewest_ranks(config: RunConfig, machine: Machine) -> int | None:
    """The smallest number of ranks that hold the student; None if none that is tried does.

    From the ranks of one shard on, twice as many each time.
    """
    ranks = config.train.replicate * config.train.context_parallel
    while ranks <= MOST_RANKS:
        changed = _with(config, "train", {"ranks": ranks})
        if sum(memory_of(changed, "train", machine).gpu.values()) <= (machine.total or 0):
            return ranks
        ranks *= 2
    return None


def memory_rows(config: RunConfig, machine: Machine) -> Iterator[tuple[str, ...]]:
    """Of each pool's GPUs and hosts: pool, processes, where, bytes of each, its terms by size.

    Raises ModelError for a model that is not on this machine.
    """
    for pool in pools_of(config, machine):
        for where, terms in (("GPU", pool.gpu), ("host", pool.host | pool.first)):
            if terms:
                listed = _listed(terms)
                if where == "GPU" and pool.name != "train" and machine.total is not None:
                    left = _room(config, pool.name, machine) - sum(terms.values()) + LEAST
                    listed += f"; KV cache of at most {_cache(config, pool.name, machine, left)}"
                total = in_gib(sum(terms.values()))
                yield pool.name, str(pool.processes), where, total, listed


def in_gib(nbytes: int) -> str:
    """Bytes as GiB, or as MiB if there are few."""
    if nbytes < GIB // 10:
        return f"{nbytes / 2**20:.1f} MiB"
    return f"{nbytes / GIB:.1f} GiB"


def _cache(config: RunConfig, name: str, machine: Machine, nbytes: int) -> str:
    return f"{cache_tokens(config, name, machine, max(nbytes, 0))} tokens"


def _faults(config: RunConfig, machine: Machine) -> Iterator[_Fault]:
    host = machine.total if machine.device == "cpu" else machine.host
    if machine.device == "cuda" and machine.total is not None:
        yield from _gpu_faults(config, machine, machine.total)
    if host is not None:
        yield from _host_faults(config, machine, host)


def _gpu_faults(config: RunConfig, machine: Machine, total: int) -> Iterator[_Fault]:
    """Pools with dedicated GPUs; ``gpu_memory.faults`` has those that share them."""
    for pool in pools_of(config, machine):
        if host_of(config, pool.name) != pool.name or guests_of(config, pool.name):
            continue
        if pool.name == EVAL and host_of(config, "rollout") == "rollout":
            continue  # its engines are those of rollout
        room, needed = _room(config, pool.name, machine), sum(pool.gpu.values())
        if needed > room:
            what = "a rank" if pool.name == "train" else "an engine"
            fault = f"{what} needs {_needs(pool.gpu)}; its GPU has {in_gib(total)}"
            fault += "" if room == total else f", of which it may take {in_gib(room)}"
            yield _Fault(pool.name, "GPU", needed, fault)


def _host_faults(config: RunConfig, machine: Machine, total: int) -> Iterator[_Fault]:
    """Of all pools together; the bound of what code takes refuses nothing."""
    pools = pools_of(config, machine)
    sums = {pool.name: _on_host(pool) for pool in pools}
    needed = sum(sums.values())
    if needed > total:
        largest = max(pools, key=lambda pool: sums[pool.name])
        most = f"most of it {largest.name}, {largest.processes} times {_needs(largest.host)}"
        most += f" and once {_needs(largest.first)}" if largest.first else ""
        fault = f"the run needs {in_gib(needed)} of host memory, {most}; this machine has "
        yield _Fault(largest.name, "host", needed, fault + in_gib(total))


def _on_host(pool: PoolMemory) -> int:
    each = sum(pool.host.values()) - pool.host["process"]
    return pool.processes * each + sum(pool.first.values())


def _remedy(config: RunConfig, fault: _Fault, machine: Machine) -> str:
    """Single changes that mend the fault and make no other one, the best first, with their bytes.

    If there is none, those changes that mend it together.
    """
    known = {one.place for one in _faults(config, machine)} - {fault.place}
    found, smaller = [], []
    for key, value in _changes(config, fault.pool, machine):
        changed = _valid(_with(config, fault.pool, {key: value}))
        if changed is None or (needed := _needed(changed, fault, machine)) >= fault.needed:
            continue
        bytes_ = f"{in_gib(needed)}{_missing(changed, machine)}"
        words = f"{fault.pool}.{key}: {value} ({bytes_})"
        smaller.append((needed, key, value))
        if {one.place for one in _faults(changed, machine)} <= known:
            found.append((bool(_missing(changed, machine)), needed, words))
    if found:
        return "; ".join(words for *_, words in sorted(found))
    return _together(config, fault, machine, known, sorted(smaller, key=itemgetter(0)))


def _together(
    config: RunConfig,
    fault: _Fault,
    machine: Machine,
    known: set[tuple[str, str]],
    changes: list[tuple[int, str, Any]],
) -> str:
    """Changes one after the other, the best first, each that still helps, until they suffice."""
    taken: dict[str, Any] = {}
    needed = fault.needed
    for _, key, value in changes:
        changed = _valid(_with(config, fault.pool, taken | {key: value}))
        if key in taken or changed is None or _needed(changed, fault, machine) >= needed:
            continue
        taken, needed = taken | {key: value}, _needed(changed, fault, machine)
        if {one.place for one in _faults(changed, machine)} <= known:
            words = " and ".join(f"{fault.pool}.{key}: {value}" for key, value in taken.items())
            return f"together {words} ({in_gib(needed)}{_missing(changed, machine)})"
    return SMALLER


def _valid(config: RunConfig) -> RunConfig | None:
    """The config as a file with the changes would give it; None if it is refused."""
    try:
        return RunConfig.model_validate(config.model_dump(by_alias=True))
    except ValueError:
        return None


def _needed(config: RunConfig, fault: _Fault, machine: Machine) -> int:
    """The bytes that the fault is about, under another config."""
    if fault.where == "GPU":
        return sum(memory_of(config, fault.pool, machine).gpu.values())
    return sum(map(_on_host, pools_of(config, machine)))


def _missing(config: RunConfig, machine: Machine) -> str:
    """Words for a config that takes more GPUs than the machine has; empty for others."""
    taken = sum(pool.gpus for pool in pools(config))
    if machine.gpus is None or taken <= machine.gpus:
        return ""
    return f"; the pools then take {taken} GPUs, this machine has {machine.gpus}"


def _changes(config: RunConfig, name: str, machine: Machine) -> Iterator[tuple[str, Any]]:
    """Keys of a pool's section, with values that take less memory."""
    if name == EVAL:  # its engines are those of ``rollout``, but for their number
        yield from (("replicas", fewer) for fewer in (1, 0) if fewer < config.eval.max_replicas)
        return
    if name != "train":
        section = _section(config, name)
        model = config.student.model if name == "rollout" else config.teacher_model(_teacher(name))
        heads, parallel = machine.sizes(model).heads, section.tensor_parallel
        more = (parallel * times for times in (2, 4, 8))
        yield from (("tensor_parallel", wide) for wide in more if heads % wide == 0)
        yield from (("replicas", fewer) for fewer in (1,) if fewer < section.max_replicas)
        return
    train = config.train
    if machine.device == "cuda":
        ranks = fewest_ranks(config, machine) or 0
        yield "ranks", ranks if ranks > train.ranks else 2 * train.ranks
        yield "reduce_gradients", "micro_batch"
        yield "dtype", "bfloat16"
        yield from (("offload", what) for what in ("moments", "parameters", "none"))
    yield "gradient_checkpointing", "full"
    yield "tokens_per_micro_batch", max(train.tokens_per_micro_batch // 2, 1)
    yield "moments", "8bit"


def _section(config: RunConfig, name: str) -> Any:
    if name in ("train", "rollout", EVAL):
        return getattr(config, name)
    return config.teachers[_teacher(name)]


def _teacher(name: str) -> str:
    return name.removeprefix("teachers.")


def _with(config: RunConfig, name: str, changes: dict[str, Any]) -> RunConfig:
    """The config with changes of one section."""
    section = _section(config, name).model_copy(update=changes)
    if name in ("train", "rollout", EVAL):
        return config.model_copy(update={name: section})
    teachers = {**config.teachers, _teacher(name): section}
    return config.model_copy(update={"teachers": teachers})


def _room(config: RunConfig, name: str, machine: Machine) -> int:
    """Bytes of a GPU of known size that a pool may take, also outside of an engine's share."""
    total = machine.total or 0
    if name == "train":
        return total
    fixed = share_of(config, name)
    share = share_left(total, beside(config, name, machine.sizes)) if fixed is None else fixed
    return min(int(share * total) + sum(outside(config, name, machine).values()), total)


def _needs(terms: Terms) -> str:
    """The sum, and all terms by size: ``40.1 GiB (moments 20.0 GiB, …)``."""
    return f"{in_gib(sum(terms.values()))} ({_listed(terms)})"


def _listed(terms: Terms) -> str:
    found = sorted(((nbytes, term) for term, nbytes in terms.items() if nbytes), reverse=True)
    return ", ".join(f"{term} {in_gib(nbytes)}" for nbytes, term in found)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
