"""Whether each pool fits GPUs of its own, or the host's memory; and which config key helps most.

async_opd.memory: bytes by term ──► fault with all terms, the largest first
                               └──► changes of the config, each with the bytes that it leads to
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from async_opd.checks.gpu_memory import host_of, share_of
from async_opd.checks.resources import gpu_bytes, guests_of
from async_opd.config.run_config import RunConfig
from async_opd.memory.pools import CONTEXT, GIB, LEAST, Machine, cache_tokens, memory_of
from async_opd.memory.pools import pool_memory as pools_of
from async_opd.memory.step import Terms
from async_opd.models.engine_args import Device, share_left

NEAR = 0.9
"""A rank that needs more than this share of a GPU is noted: a plan may be wrong by a tenth."""
MOST_RANKS = 1024
"""Ranks that are tried for a student that does not fit."""
SMALLER = "a smaller model, or more memory"

Problem = tuple[str, str, str]
"""Config key, fault, remedy."""


def this_machine(config: RunConfig, device: Device) -> Machine:
    """Of this machine, or of GPUs as the config says."""
    return Machine(device, gpu_bytes(config) if device == "cuda" else _host_bytes())


def faults_of_memory(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    """Pools that need more than there is; nothing where that is not known."""
    if machine.total is not None:
        found = _gpu_faults if machine.device == "cuda" else _host_faults
        yield from found(config, machine, machine.total)


def near(config: RunConfig, machine: Machine) -> Iterator[str]:
    """A note if a rank fits its GPU, but less than a tenth of it is left."""
    terms, total = memory_of(config, "train", machine).gpu, machine.total or 0
    if NEAR * total < sum(terms.values()) <= total and not guests_of(config, "train"):
        yield f"train: a rank needs {_needs(terms)}; its GPU has {in_gib(total)}"


def fewest_ranks(config: RunConfig, machine: Machine) -> int | None:
    """The smallest number of ranks that hold the student; None if none that is tried does.

    From the ranks of one shard on, twice as many each time.
    """
    ranks = config.train.replicate * config.train.context_parallel
    while ranks <= MOST_RANKS:
        changed = _with(config, "train", {"ranks": ranks})
        if _sum(changed, "train", machine) <= (machine.total or 0):
            return ranks
        ranks *= 2
    return None


def memory_rows(config: RunConfig, machine: Machine) -> Iterator[tuple[str, ...]]:
    """Of each pool's GPUs and hosts: pool, processes, where, bytes of each, its terms by size.

    Raises ModelError for a model that is not on this machine.
    """
    for pool in pools_of(config, machine):
        for where, terms in (("GPU", pool.gpu), ("host", pool.host)):
            if terms:
                listed = _listed(terms)
                if where == "GPU" and pool.name != "train" and machine.total is not None:
                    left = _room(config, pool.name, machine.total) - sum(terms.values()) + LEAST
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


def _gpu_faults(config: RunConfig, machine: Machine, total: int) -> Iterator[Problem]:
    """Pools with GPUs of their own; ``gpu_memory.faults`` has those that share them."""
    for pool in pools_of(config, machine):
        if host_of(config, pool.name) != pool.name or guests_of(config, pool.name):
            continue
        room = _room(config, pool.name, total)
        if sum(pool.gpu.values()) > room:
            what = "a rank" if pool.name == "train" else "an engine"
            fault = f"{what} needs {_needs(pool.gpu)}; its GPU has {in_gib(total)}"
            fault += "" if room == total else f", of which it may take {in_gib(room)}"
            yield pool.name, fault, _remedy(config, pool.name, machine)


def _host_faults(config: RunConfig, machine: Machine, total: int) -> Iterator[Problem]:
    """Of all pools together; the bound of what code takes refuses nothing."""
    pools = pools_of(config, machine)
    sums = {
        pool.name: pool.processes * (sum(pool.host.values()) - pool.host["process"])
        for pool in pools
    }
    needed = sum(sums.values())
    if needed > total:
        largest = max(pools, key=lambda pool: sums[pool.name])
        most = f"most of it {largest.name}, {largest.processes} times {_needs(largest.host)}"
        fault = f"the run needs {in_gib(needed)}, {most}; this machine has {in_gib(total)}"
        yield largest.name, fault, _remedy(config, largest.name, machine)


def _remedy(config: RunConfig, name: str, machine: Machine) -> str:
    """Single changes that need less, each with what it needs, the best one first."""
    now = _sum(config, name, machine)
    found = [
        (nbytes, f"{name}.{key}: {value} ({in_gib(nbytes)})")
        for key, value in _changes(config, name, machine)
        if (nbytes := _sum(_with(config, name, {key: value}), name, machine)) < now
    ]
    return "; ".join(change for _, change in sorted(found)) or SMALLER


def _changes(config: RunConfig, name: str, machine: Machine) -> Iterator[tuple[str, Any]]:
    """Keys of a pool's section, with values that take less memory."""
    if name != "train":
        parallel = _section(config, name).tensor_parallel
        yield from (("tensor_parallel", parallel * times) for times in (2, 4, 8))
        return
    train = config.train
    if machine.device == "cuda":
        ranks = fewest_ranks(config, machine) or 0
        yield "ranks", ranks if ranks > train.ranks else 2 * train.ranks
        yield "reduce_gradients", "micro_batch"
        yield "dtype", "bfloat16"
        yield "offload", "moments"
        yield "offload", "parameters"
    yield "gradient_checkpointing", "full"
    yield "tokens_per_micro_batch", max(train.tokens_per_micro_batch // 2, 1)
    yield "moments", "8bit"


def _sum(config: RunConfig, name: str, machine: Machine) -> int:
    memory = memory_of(config, name, machine)
    return sum((memory.gpu if machine.device == "cuda" else memory.host).values())


def _section(config: RunConfig, name: str) -> Any:
    if name in ("train", "rollout"):
        return getattr(config, name)
    return config.teachers[name.removeprefix("teachers.")]


def _with(config: RunConfig, name: str, changes: dict[str, Any]) -> RunConfig:
    """The config with changes of one section."""
    section = _section(config, name).model_copy(update=changes)
    if name in ("train", "rollout"):
        return config.model_copy(update={name: section})
    teachers = {**config.teachers, name.removeprefix("teachers."): section}
    return config.model_copy(update={"teachers": teachers})


def _room(config: RunConfig, name: str, total: int) -> int:
    """Bytes of a GPU of its own that a pool may take, its context included."""
    if name == "train":
        return total
    fixed = share_of(config, name)
    share = share_left(total, CONTEXT) if fixed is None else fixed
    return min(int(share * total) + CONTEXT, total)


def _needs(terms: Terms) -> str:
    """The sum, and all terms by size: ``40.1 GiB (moments 20.0 GiB, …)``."""
    return f"{in_gib(sum(terms.values()))} ({_listed(terms)})"


def _listed(terms: Terms) -> str:
    found = sorted(((nbytes, term) for term, nbytes in terms.items() if nbytes), reverse=True)
    return ", ".join(f"{term} {in_gib(nbytes)}" for nbytes, term in found)


def _host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
