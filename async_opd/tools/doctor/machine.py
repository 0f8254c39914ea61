"""Whether this machine suits the run: devices, memory, network, disk and wandb's login.

Each function yields the findings of one topic.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from secrets import token_hex

from async_opd.checkpoint.run_copies import RunCopies
from async_opd.checks.memory_fit import in_gib, memory_rows, this_machine
from async_opd.checks.nodes import NodeReport, Probe, node_problems, report
from async_opd.checks.resources import pools
from async_opd.checks.run_dir import ANOTHER, MAKE_ROOM, run_dir_of, space_of, unwritable
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError
from async_opd.files.remote import RemoteFile
from async_opd.models.engine_args import Device
from async_opd.models.model_files import ModelError
from async_opd.processes.listening import listening_socket
from async_opd.tools.doctor.finding import Finding


def devices(config: RunConfig, device: Device, gpus: int) -> Iterator[Finding]:
    """A line for the device, and one for each pool. ``gpus``: those that PyTorch can use here."""
    where = (
        "that PyTorch can use here" if config.cluster.joins is None else "of the cluster's driver"
    )
    asked = ""
    if config.cluster.joins is not None and config.cluster.device == "auto" and device == "cuda":
        asked = " if the cluster has GPUs, which is asked when engines start"
    yield Finding("devices", "ok", f"all pools compute on {device}{asked}; GPUs {where}: {gpus}")
    if device == "cpu" and gpus:
        message = f"cluster.device is cpu, and {gpus} GPUs are not used"
        yield Finding("devices", "warning", message, "set cluster.device to auto")
    for pool in pools(config):
        each = f"{pool.gpus_per_replica} GPU each" if device == "cuda" else "CPU"
        each += f", those of {pool.shares}" if pool.shares else ""
        what = "ranks" if pool.name == "train" else "replicas"
        yield Finding("devices", "ok", f"{pool.name}: {pool.count} {what}, {each}, {pool.model}")


def memory(config: RunConfig, device: Device, gpus: int) -> Iterator[Finding]:
    """A line for each pool; preflight has reported the pools that do not fit."""
    machine = this_machine(config, device, gpus)
    whose = "each GPU" if device == "cuda" else "this host"
    if machine.total is None:
        remedy = "set cluster.gpu_memory_gib to compare the pools with it"
        yield Finding("memory", "warning", f"the memory of {whose} is not known", remedy)
    else:
        yield Finding("memory", "ok", f"{whose} has {in_gib(machine.total)}")
    try:
        for pool, processes, where, nbytes, terms in memory_rows(config, machine):
            found = f"{pool}: {processes} processes of {nbytes} of the {where} each ({terms})"
            yield Finding("memory", "ok", found)
    except ModelError as error:
        yield Finding("memory", "warning", f"unknown: {error.message}", error.remedy)


LEAST_PORTS = 8
"""Fewer free ports may not suffice for a sync that is made again while the last one closes."""


def network(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Findings about this machine; those of other nodes are compared when the run starts."""
    yield _ports(config.cluster.port_range)
    probe = Probe(None, "", "", {}, config.cluster.interface)
    own = report("this machine", probe, device == "cuda" and config.cluster.joins is None)
    problems = node_problems(NodeReport("", own.versions, own.settings), [own], {})
    for problem in problems:
        yield Finding("network", "error", problem.message, problem.remedy)
    if not problems:
        yield Finding("network", "ok", f"shared memory: {own.shm_mib} MiB")
    yield from _shared_folders(config)


def _ports(ports: range | None) -> Finding:
    if ports is None:
        return Finding("network", "ok", "ports: any free one (cluster.ports)")
    free = sum(map(_is_free, ports))
    found = f"cluster.ports: {free} of {len(ports)} ports from {ports.start} on are free here"
    if free >= LEAST_PORTS:
        return Finding("network", "ok", found)
    return Finding("network", "warning" if free else "error", found, "widen cluster.ports")


def _is_free(port: int) -> bool:
    try:
        listening_socket("127.0.0.1", range(port, port + 1)).close()
    except (StageError, OSError):
        return False
    return True


def _shared_folders(config: RunConfig) -> Iterator[Finding]:
    """In a cluster: the folders that every node needs under the same path."""
    if config.cluster.joins is None:
        yield Finding("network", "ok", "one machine: no folder has to be shared")
        return
    paths = [config.run_dir, config.student.model, *map(config.teacher_model, config.teachers)]
    folders = sorted({path for path in paths if path is not None and os.path.isabs(path)})
    yield Finding(
        "network",
        "warning",
        f"{socket.gethostname()} joins {config.cluster.joins}: every node needs "
        f"{', '.join(folders) or 'its models in the cache of the hub'} under the same path",
        "the run compares all nodes before an engine starts, and so does doctor --engines",
    )


def disk(config: RunConfig, free: int | None = None) -> Iterator[Finding]:
    """Findings about the run directory and ``checkpoint.mirror``.

    ``free``: bytes left in the run directory, by default as the disk says.
    """
    if config.checkpoint.mirror is not None:
        yield _mirror(config.checkpoint.mirror)
    run_dir = run_dir_of(config)
    if fault := unwritable(run_dir):
        yield Finding("disk", "error", fault, ANOTHER)
        return
    space = space_of(config, free)
    has = f"{run_dir} has {in_gib(space.free)}"
    if space.needed is None:
        message = f"{has}; the run's need is not known: {space.why}"
        yield Finding("disk", "warning", message, MAKE_ROOM)
        return
    found = f"{has}, the run keeps at most {in_gib(space.most)} ({space.terms})"
    if space.most <= space.free:
        yield Finding("disk", "ok", found)
    else:
        yield Finding("disk", "error" if space.needed > space.free else "warning", found, MAKE_ROOM)


def _mirror(url: str) -> Finding:
    """Writes a small file to the mirror, and reads and removes it."""
    probe = RemoteFile(url) / f"doctor-{token_hex(8)}"
    try:
        probe.write(b"probe")
        probe.read(len(b"probe"))
        probe.remove()
        newest = RunCopies.at(url).newest()
    except OSError as error:
        remedy = "look at the credentials in this environment, and their rights to write and remove"
        return Finding(
            "disk", "error", f"{url} (checkpoint.mirror) cannot be used: {error}", remedy
        )
    has = "no checkpoint" if newest is None else f"step {newest[0]} of a run, for --resume"
    return Finding("disk", "ok", f"{url} (checkpoint.mirror) can be written; it has {has}")


def wandb_login(config: RunConfig, mode: Callable[[], str] | None = None) -> Iterator[Finding]:
    """A line for ``log.wandb``. ``mode``: of wandb's own settings; it asks no server."""
    wanted = config.log.wandb
    if wanted in ("off", "offline"):
        yield Finding("wandb", "ok", f"log.wandb is {wanted}")
        return
    from async_opd.observability.wandb_sink import LOGIN, has_login, own_mode

    asked = (lambda: "online" if has_login() else "offline") if wanted == "online" else own_mode
    found = (mode or asked)()
    if found == "online":
        message = f"a login was found: the run logs to project {config.log.project}"
        yield Finding("wandb", "ok", message)
    elif wanted == "online":
        message = "log.wandb is online, but there is no login of wandb here"
        yield Finding("wandb", "error", message, LOGIN)
    else:
        yield Finding("wandb", "warning", f"the run would be {found}: no login was found", LOGIN)
