"""How much of a GPU each engine may take: all other memory on the same GPU is counted.

    ┌──────────── a GPU ────────────┐
    │ what works now                │  an engine: gpu_memory_utilization · total
    │ what it has outside of that   │  CUDA context, communicators, loads of weights
    │ all others on this GPU, asleep│  engines: contexts, graphs; a trainer: weights, optimizer
    └───────────────────────────────┘

A trainer whose rollout engines are on its GPUs is offloaded while they work: it keeps its context,
its communicators, and the heads of teachers. One process of each works at a time
(``async_opd.sharing.time_sharing``).
``async_opd.memory`` has the bytes; those of contexts and sleeping engines are bounds. vLLM compares
an engine's share with the memory that is free when it starts
(``vllm.v1.worker.utils.request_memory``), and fills it with KV cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from async_opd.checks.gpu_plan import table
from async_opd.checks.resources import guests_of, pools, section_of
from async_opd.config.run_config import RunConfig
from async_opd.memory.pools import (
    COMMUNICATOR,
    GIB,
    Machine,
    Sizes,
    communicators,
    memory_of,
    outside,
    resting,
)
from async_opd.models.engine_args import share_left
from async_opd.models.model_size import ModelSize

ASLEEP = 2 * GIB
"""Bytes of an engine at sleep level 1 beside its communicators: its weights, its CUDA graphs'
buffers and its KV cache are gone from the GPU (``CuMemBackend.suspend``); its context and the
graphs themselves stay."""


@dataclass(frozen=True)
class Tenant:
    """A pool on a GPU: ``works`` bytes at least while it works, ``rests`` while others do.

    ``outside`` bytes of ``works`` are in no engine's share. ``fixed`` is the configured one, None
    for ``auto`` and for the trainer.
    """

    name: str
    works: int
    rests: int
    outside: int
    fixed: float | None = None

    @property
    def key(self) -> str:
        """The config key of its share; the trainer has none."""
        return "train" if self.name == "train" else f"{self.name}.engine.gpu_memory_utilization"


def beside(config: RunConfig, pool: str, sizes: Sizes = ModelSize.of_weights) -> int:
    """Bytes of each of the pool's GPUs that are not its engine's to take.

    They are what it has outside of its share, and what all others keep there while it works.
    """
    machine, host = Machine("cuda", sizes=sizes), host_of(config, pool)
    others = {host, *guests_of(config, host)} - {pool}
    resting = sum(_rests(config, name, machine) for name in others)
    return sum(outside(config, pool, machine).values()) + resting


def faults(
    config: RunConfig, total: int, sizes: Sizes = ModelSize.of_weights
) -> Iterator[tuple[str, str, str]]:
    """Pools that do not fit a shared GPU of ``total`` bytes: (key, fault, remedy)."""
    for host in sorted({pool.shares for pool in pools(config) if pool.shares}):
        tenants = _tenants(config, host, Machine("cuda", total, sizes))
        for tenant in tenants:
            rest = sum(other.rests for other in tenants if other is not tenant)
            fault = _fault(tenant, total, rest)
            if fault:
                yield tenant.key, f"{fault}\n{_shown(tenants, total)}", REMEDY


REMEDY = "set gpu_memory_utilization to auto, take fewer teachers on these GPUs, or more GPUs"


def _fault(tenant: Tenant, total: int, rest: int) -> str:
    """Why the tenant cannot work beside ``rest`` bytes of others; empty if it can."""
    left = share_left(total, tenant.outside + rest)
    if tenant.fixed is not None and tenant.fixed * total > total - tenant.outside - rest:
        return f"found {tenant.fixed:g}, of a GPU that has at most {left:g} beside the others on it"
    taken = total - rest
    if tenant.name != "train":
        taken = int((left if tenant.fixed is None else tenant.fixed) * total)
        taken += tenant.outside
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


def _tenants(config: RunConfig, host: str, machine: Machine) -> list[Tenant]:
    """The host, and its guests."""
    return [
        Tenant(
            name,
            sum(memory_of(config, name, machine).gpu.values()),
            _rests(config, name, machine),
            sum(outside(config, name, machine).values()),
            None if name == "train" else share_of(config, name),
        )
        for name in (host, *guests_of(config, host))
    ]


def share_of(config: RunConfig, name: str) -> float | None:
    """The configured share of an engine; None for ``auto``."""
    pool: Any = config.rollout
    if section_of(name) != "rollout":
        pool = config.teachers[name.removeprefix("teachers.")]
    own = pool.engine.gpu_memory_utilization
    share: float | str = pool.engine.extra.get("gpu_memory_utilization", own)
    return None if isinstance(share, str) else share


def _rests(config: RunConfig, name: str, machine: Machine) -> int:
    """Bytes that a pool keeps on its GPUs while others work there."""
    if name == "train":
        return sum(resting(config, machine).values())
    return ASLEEP + COMMUNICATOR * communicators(config, name, machine)


def host_of(config: RunConfig, pool: str) -> str:
    """The pool whose GPUs a pool has: its own, or its host's."""
    return next((one.shares for one in pools(config) if one.name == pool), None) or pool
