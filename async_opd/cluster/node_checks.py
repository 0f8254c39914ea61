"""Compares the nodes of a joined cluster with the driver's, before any engine starts there.

Those of the start are compared at once; one that joins later when Ray starts a process on it.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from async_opd.checks.nodes import NodeReport, Probe, files_of, node_problems, report
from async_opd.cluster.actor_shell import START_KEY
from async_opd.cluster.faults import to_stage_error
from async_opd.cluster.network import shared_environment
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EngineTeacher
from async_opd.core.errors import ConfigError, Problem, StageError
from async_opd.files.safe_open import make_folder, regular_file
from async_opd.models.engine_args import Device
from async_opd.models.model_files import is_vision_model
from async_opd.processes.own_settings import SAFE_PATH
from async_opd.waiting.deadline import Deadline, gather_or_cancel


async def check_nodes(config: RunConfig, device: Device) -> ComparedNodes | None:
    """Compares every node of a joined cluster: any may get an actor. None for a local run.

    ConfigError with all problems: a folder that a node cannot use, versions and settings of NCCL
    that differ from the driver's, too little shared memory, a node that does not answer.
    """
    if config.cluster.address is None:
        return None
    if config.run_dir is not None:  # a process on a node has another working directory
        run_dir = os.path.join(os.getcwd(), config.run_dir)
        config = config.model_copy(update={"run_dir": run_dir})
    with _probe(config, _folders(config)) as probe:
        driver = await asyncio.to_thread(report, "the driver", probe, False)
    compared = ComparedNodes(config, device, driver)
    nodes = await asyncio.to_thread(ray.nodes)
    problems = await compared.problems([node for node in nodes if node["Alive"]])
    if problems:
        raise ConfigError(problems)
    return compared


@dataclass
class ComparedNodes:
    """The nodes that can run what the driver can. Can be pickled and sent to other actors."""

    config: RunConfig
    device: Device
    driver: NodeReport
    ids: set[str] = field(default_factory=set)

    async def compare(self, node: str) -> None:
        """Compares the node of this id unless it was. StageError with all problems of it."""
        if node in self.ids:
            return
        found = await asyncio.to_thread(ray.nodes)
        problems = await self.problems([one for one in found if one["NodeID"] == node])
        if problems:
            words = "; ".join(f"{one.key}: {one.message}" for one in problems)
            remedies = dict.fromkeys(one.remedy for one in problems)
            raise StageError("cluster", f"its node differs: {words}", "; ".join(remedies))

    async def problems(self, nodes: Sequence[dict[str, Any]]) -> list[Problem]:
        """Runs a task on each of the nodes, which are compared from now on if it finds nothing."""
        if not nodes:
            return []
        keys = _folders(self.config)
        with _probe(self.config, keys) as probe:
            asked = (_ask(self.config, node, probe, self.device) for node in nodes)
            found = await gather_or_cancel(*asked)
        problems = node_problems(self.driver, found, keys)
        if not problems:
            self.ids.update(node["NodeID"] for node in nodes)
        return problems


def _folders(config: RunConfig) -> dict[str, str]:
    """The folders that every node has to have, with their config keys."""
    models = {
        config.teacher_model(name): f"teachers.{name}.model"
        for name, teacher in config.teachers.items()
        if isinstance(teacher, EngineTeacher)
    }
    models[config.student.model] = "student.model"
    found = {path: key for path, key in models.items() if os.path.isdir(path)}
    return found | ({} if config.run_dir is None else {config.run_dir: "run_dir"})


@contextmanager
def _probe(config: RunConfig, folders: dict[str, str]) -> Iterator[Probe]:
    """A file in the run directory, removed at the end."""
    models = {path: files_of(path) for path, key in folders.items() if key != "run_dir"}
    token = secrets.token_hex(8)
    run_dir, interface = config.run_dir, config.cluster.interface
    vision = any(map(is_vision_model, models))
    probe = Probe(run_dir, f".probe-{token}", token, models, interface, vision)
    if run_dir is None:
        yield probe
        return
    path = Path(run_dir) / probe.name
    make_folder(path.parent)
    try:
        with open(path, "x", opener=regular_file) as file:
            file.write(token)
        yield probe
    finally:
        path.unlink(missing_ok=True)


async def _ask(config: RunConfig, node: dict[str, Any], probe: Probe, device: Device) -> NodeReport:
    """The node's report, or one with the error of the task there."""
    name = f"{node['NodeManagerHostname']} ({node['NodeManagerAddress']})"
    gpus = device == "cuda" and "GPU" in node["Resources"]
    task = ray.remote(report).options(
        num_cpus=0,
        max_retries=0,
        scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
        runtime_env={
            "env_vars": {**shared_environment(config.cluster, os.environ), SAFE_PATH: "1"}
        },
    )
    ask = partial(task.remote, name, replace(probe, address=node["NodeManagerAddress"]), gpus)
    try:
        return await _answer(ask, config.timeouts.engine_start_s)
    except StageError as error:
        return NodeReport(name, error=f"no report: {error.cause}")


async def _answer(ask: Any, timeout_s: float) -> NodeReport:
    try:
        waiting = Deadline("node").within(timeout_s, "a report", ask(), f"raise {START_KEY}")
        found: NodeReport = await waiting
        return found
    except ray.exceptions.RayError as error:
        raise to_stage_error("node", "its report", error, False) from error
