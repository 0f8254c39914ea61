"""The bytes that each pool needs at its peak, as the planner computes them."""

from __future__ import annotations

from collections.abc import Iterator

from async_opd.checks.memory_fit import in_gib, memory_rows, this_machine
from async_opd.config.run_config import RunConfig
from async_opd.models.engine_args import Device
from async_opd.models.model_files import ModelError
from async_opd.tools.doctor.finding import Finding

TOPIC = "memory"


def memory(config: RunConfig, device: Device, gpus: int) -> Iterator[Finding]:
    """A line for each pool; preflight has reported the pools that do not fit."""
    machine = this_machine(config, device, gpus)
    whose = "each GPU" if device == "cuda" else "this host"
    if machine.total is None:
        remedy = "set cluster.gpu_memory_gib to compare the pools with it"
        yield Finding(TOPIC, "warning", f"the memory of {whose} is not known", remedy)
    else:
        yield Finding(TOPIC, "ok", f"{whose} has {in_gib(machine.total)}")
    try:
        for pool, processes, where, nbytes, terms in memory_rows(config, machine):
            found = f"{pool}: {processes} processes of {nbytes} of the {where} each ({terms})"
            yield Finding(TOPIC, "ok", found)
    except ModelError as error:
        yield Finding(TOPIC, "warning", f"unknown: {error.message}", error.remedy)
