"""Compares the nodes of a joined cluster with the driver's, before any engine starts there.

Those of the start are compared at once; one that joins later when Ray starts a process on it.
``survey`` does the same for ``async_opd check --cluster``, and starts nothing that stays.
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

from async_opd.checks.gpu_plan import GpuNode
from async_opd.checks.nodes import AGREED, NodeReport, Probe, files_of, node_problems, report
from async_opd.cluster.faults import to_stage_error
from async_opd.cluster.network import shared_environment
from async_opd.cluster.placement.gpu_bundles import names
from async_opd.cluster.placement.nodes import cluster_nodes
from async_opd.cluster.placement.reserving import planned
from async_opd.cluster.remote import START_KEY
from async_opd.cluster.session import joining, ray_session
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
    compared = await _with_the_driver(config, device)
    nodes = await asyncio.to_thread(ray.nodes)
    problems = await compared.problems([node for node in nodes if node["Alive"]])
    if problems:
        raise ConfigError(problems)
    return compared


@dataclass(frozen=True)
class Survey:
    """The findings of a run in the cluster: its nodes, the processes on each, and all problems.

    ``waits``: the table of missing GPUs where the run would wait for them; '' otherwise.
    """

    nodes: list[tuple[GpuNode, NodeReport, list[str]]]
    problems: list[Problem]
    waits: str


async def survey(config: RunConfig, device: Device, load: bool) -> Survey:
    """Joins the cluster, and asks all of its nodes. No actor starts, and no GPU is reserved.

    Nodes write and remove a file where the run directory is, or would be made. ``load``: they
    import code that the config names, as before a run, and in the environment that it gives; that
    may run code, too. StageError if the cluster does not answer.
    """
    below = _folder_of(config.run_dir or "runs")
    if not load:
        bare = config.cluster.model_copy(update={"env": {}, "runtime_env": {}})
        config = config.model_copy(update={"cluster": bare})
    config = joining(config).model_copy(update={"run_dir": None})
    async with ray_session(config, print):
        config = config.model_copy(update={"run_dir": below})
        compared = replace(await _with_the_driver(config, device), load=load)
        nodes, free = await asyncio.to_thread(lambda: (ray.nodes(), cluster_nodes()))
        alive = [node for node in nodes if node["Alive"]]
        found = await compared.reports(alive)
        problems = node_problems(compared.driver, found, _folders(config))
        named = {node["NodeID"]: answer for node, answer in zip(alive, found, strict=True)}
        try:
            placed, waits = planned(config, device, free)
        except ConfigError as error:
            placed, waits = {}, ""
            problems += error.problems
    rows = [
        (node, named[node.id], [names(unit) for unit, at in placed.items() if at == node.id])
        for node in free
        if node.id in named
    ]
    return Survey(rows, problems, waits)


def _folder_of(run_dir: str) -> str:
    """The run directory, or the folder that is there to make it in."""
    path = Path(run_dir).absolute()
    return str(next(folder for folder in (path, *path.parents) if folder.is_dir()))


async def _with_the_driver(config: RunConfig, device: Device) -> ComparedNodes:
    """The driver's report, and no node's yet."""
    if config.run_dir is not None:  # a process on a node has another working directory
        run_dir = os.path.join(os.getcwd(), config.run_dir)
        config = config.model_copy(update={"run_dir": run_dir})
    with _probe(config, _folders(config), load=False) as probe:  # it has loaded it before
        driver = await asyncio.to_thread(report, "the driver", probe, False)
    given = {name: value for name, value in config.cluster.env.items() if name in AGREED}
    driver = replace(driver, settings={**driver.settings, **given})
    return ComparedNodes(config, device, driver)


@dataclass
class ComparedNodes:
    """The nodes that can run what the driver can. Can be pickled and sent to other actors."""

    config: RunConfig
    device: Device
    driver: NodeReport
    ids: set[str] = field(default_factory=set)
    load: bool = True
    """Nodes import the code that the config names."""

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
        problems = node_problems(self.driver, await self.reports(nodes), _folders(self.config))
        if not problems:
            self.ids.update(node["NodeID"] for node in nodes)
        return problems

    async def reports(self, nodes: Sequence[dict[str, Any]]) -> list[NodeReport]:
        """The answer of a task on each of the nodes, in their order."""
        if not nodes:
            return []
        with _probe(self.config, _folders(self.config), self.load) as probe:
            asked = (_ask(self.config, node, probe, self.device) for node in nodes)
            return await gather_or_cancel(*asked)


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
def _probe(config: RunConfig, folders: dict[str, str], load: bool) -> Iterator[Probe]:
    """A file in the run directory, removed at the end. ``load``: with code to import."""
    models = {path: files_of(path) for path, key in folders.items() if key != "run_dir"}
    token = secrets.token_hex(8)
    run_dir, interface = config.run_dir, config.cluster.interface
    vision = any(map(is_vision_model, models))
    probe = Probe(run_dir, f".probe-{token}", token, models, interface, vision)
    if load:
        probe = probe.with_code(config)
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
