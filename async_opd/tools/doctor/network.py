"""Ports that the run's servers listen on, folders that all nodes share, and shared memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

from async_opd.checks.nodes import NodeReport, Probe, node_problems, report
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError
from async_opd.models.engine_args import Device
from async_opd.processes.listening import listening_socket
from async_opd.tools.doctor.finding import Finding

TOPIC = "network"
LEAST_PORTS = 8
"""Fewer free ports may not suffice for a sync that is made again while the last one closes."""


def network(config: RunConfig, device: Device) -> Iterator[Finding]:
    """Findings about this machine; those of other nodes are compared when the run starts."""
    yield _ports(config.cluster.port_range)
    probe = Probe(None, "", "", {}, config.cluster.interface)
    own = report("this machine", probe, device == "cuda" and config.cluster.joins is None)
    problems = node_problems(NodeReport("", own.versions, own.settings), [own], {})
    for problem in problems:
        yield Finding(TOPIC, "error", problem.message, problem.remedy)
    if not problems:
        yield Finding(TOPIC, "ok", f"shared memory: {own.shm_mib} MiB")
    yield from _shared(config)


def _ports(ports: range | None) -> Finding:
    if ports is None:
        return Finding(TOPIC, "ok", "ports: any free one (cluster.ports)")
    free = sum(map(_is_free, ports))
    found = f"cluster.ports: {free} of {len(ports)} ports from {ports.start} on are free here"
    if free >= LEAST_PORTS:
        return Finding(TOPIC, "ok", found)
    return Finding(TOPIC, "warning" if free else "error", found, "widen cluster.ports")


def _is_free(port: int) -> bool:
    try:
        listening_socket("127.0.0.1", range(port, port + 1)).close()
    except (StageError, OSError):
        return False
    return True


def _shared(config: RunConfig) -> Iterator[Finding]:
    """In a cluster: the folders that every node needs under the same path."""
    if config.cluster.joins is None:
        yield Finding(TOPIC, "ok", "one machine: no folder has to be shared")
        return
    paths = [config.run_dir, config.student.model, *map(config.teacher_model, config.teachers)]
    folders = sorted({path for path in paths if path is not None and os.path.isabs(path)})
    yield Finding(
        TOPIC,
        "warning",
        f"{socket.gethostname()} joins {config.cluster.joins}: every node needs "
        f"{', '.join(folders) or 'its models in the cache of the hub'} under the same path",
        "the run compares all nodes before an engine starts, and so does doctor --engines",
    )
