"""Preflight reports all problems of a run's input at once, before any engine starts.

It reads the files that a config names; it imports neither torch, ray, vllm nor transformers.
"""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

from async_opd.checks.data import DataChecks, Rows, checked
from async_opd.checks.image_families import check_families
from async_opd.checks.memory_fit import check_memory
from async_opd.checks.models import ModelChecks
from async_opd.checks.precision import check_precision
from async_opd.checks.resources import (
    built_for_cpus,
    gpu_count,
    misplaced,
    pools,
    refuse_client,
    resolve_device,
    sharing,
    unused_gpus,
)
from async_opd.checks.room import Room
from async_opd.checks.student import (
    check_adapters,
    check_routing,
    check_shared_rows,
    check_vlm_student,
    cold_start_rows,
    given_answers,
)
from async_opd.checks.templates import check_templates
from async_opd.checks.user_code import (
    check_environment,
    check_grader,
    check_mirror,
    check_user_code,
)
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.environment import ENVIRONMENT
from async_opd.core.errors import ConfigError, Findings, Problem
from async_opd.core.row import Row
from async_opd.data.hub import with_cached_data
from async_opd.models.engine_args import Device
from async_opd.models.families import refused as refused_family
from async_opd.models.hub import with_cached, without_code
from async_opd.queue.sizes import payloads, refused, traffic


@dataclass
class Inputs:
    """The rows and problems that preflight found; the run does not read the rows again."""

    train: list[Rows] = field(default_factory=list)
    """The rows of each source: on disk, or streamed."""
    eval: list[Sequence[Row]] = field(default_factory=list)
    cold_start: list[Rows] = field(default_factory=list)
    """The rows of each source of ``cold_start.data``; none where it takes ``data.train``."""
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """Settings and data that are valid, but may be unintended."""
    max_prompt_tokens: int | None = None
    """The longest training prompt that fits every model together with its response."""
    max_eval_prompt_tokens: int | None = None
    device: Device = "cpu"
    """The device of all pools."""

    @property
    def checked(self) -> list[Sequence[Row]]:
        """The training rows that were checked: all of a source, or a streamed one's first."""
        return [checked(rows) for rows in self.train]


def preflight(config: RunConfig, where: str, gpus: int | None = None, load: bool = False) -> Inputs:
    """Reads the data and collects all problems. ``gpus`` overrides the machine's number of GPUs.

    ``load``: code that the config names is run, as before a run; else its files are looked for.
    Raises what ``gpu_count`` raises.
    """
    gpus = gpu_count() if gpus is None else gpus
    found = Findings(where)
    config, partial = with_cached(config, found.notes, where)
    config, unclear = with_cached_data(config, where, found.notes)
    found.problems.extend(unclear)
    models = ModelChecks(config, found, partial)
    models.models()
    models.support()
    models.heads()
    models.quantized()
    models.positions()
    student, device = models.files.get("student.model"), resolve_device(config, gpus)
    config = config if load else without_code(config)
    data = DataChecks(config, found, load)
    check_adapters(config, None if "student.model" in partial else student, found)
    check_vlm_student(config, student, found)
    # a processor is chosen by the student's files: none is loaded of files that are refused
    data.vision = student is not None and not (
        found.has("student.model") or refused_family(student.config, device, trained=True)
    )
    check_user_code(config, found, load)
    check_mirror(config, found)
    check_routing(config, device, student, found)
    data.renders = check_templates(config, models.files, found)
    check_shared_rows(config, student, found)
    check_precision(models, device, found)
    _hardware(config, found, models, device, gpus)
    graders = _graders(config)
    for key, grader in graders.values():
        check_grader(config, found, load, key, grader)
    train, evaluation = data.sources("train"), data.sources("eval")
    if not data.unreadable:
        data.routes()
    data.images("train")
    data.images("eval")
    for part, (_, grader) in graders.items():
        data.answers(part, grader)
        data.verifiers(part)
    data.without_images()
    check_environment(config, found, load, chain.from_iterable(map(checked, train)))
    data.best_metric()
    data.sizes()
    limit = _prompts(config, models, data, "train", train)
    data.passes(train)
    longest = _prompts(config, models, data, "eval", evaluation)
    _payload(config, found, device, limit)
    cold_start = cold_start_rows(data)
    shown = {source for part in data.parts.values() for source in part.shown}
    check_families(config, device, models.files, models.partial, shown, found)
    _prompts(config, models, data, "cold_start", cold_start)
    if student is not None:
        given_answers(data, cold_start or train, Room("", 0, models.rows))
    evaluated = [checked(rows) for rows in evaluation]
    return Inputs(train, evaluated, cold_start, found.problems, found.notes, limit, longest, device)


def _graders(config: RunConfig) -> dict[str, tuple[str, str]]:
    """The key and the name of the grader of each part of the data; not an environment's reward."""
    graders = {"eval": ("eval.grader", config.eval.grader)}
    if config.reward is not None:
        graders["train"] = ("reward.grader", config.reward.grader)
    return {part: one for part, one in graders.items() if one[1] != ENVIRONMENT}


def _prompts(
    config: RunConfig, models: ModelChecks, data: DataChecks, part: str, sources: list[Rows]
) -> int | None:
    """Checks that prompts and responses of a part fit the models. Returns the prompts' limit."""
    if "student.model" not in models.files or not data.renders or not sources:
        return None
    key, response = "rollout.max_tokens", config.rollout.max_tokens
    if part == "eval" and config.eval.max_tokens is not None:
        key, response = "eval.max_tokens", config.eval.max_tokens
    bound = models.prompt_limit(key, response)
    if bound is None or not any(map(checked, sources)):
        return None
    limit, key = bound
    room = Room(key, limit, models.rows, config.data.overlong, response)
    data.prompts(part, sources, room)
    return limit


def _payload(config: RunConfig, found: Findings, device: Device, prompt_tokens: int | None) -> None:
    """Checks that the queue can hold the longest sample."""
    teachers = payloads(config, device)
    problem = refused(config, traffic(config, teachers, prompt_tokens or 0))
    if problem is not None:
        found.add(*problem)


def _hardware(
    config: RunConfig, found: Findings, models: ModelChecks, device: Device, gpus: int
) -> None:
    """Checks that the pools fit the machine, and that a cluster to join can be joined."""
    try:
        refuse_client(config)
    except ConfigError as refused:
        found.problems.extend(refused.problems)
    for key, fault, remedy in misplaced(config):
        found.add(key, f"found {fault}", remedy)
    if config.train.moments != "float32" and importlib.util.find_spec("torchao") is None:
        message = f"{config.train.moments} needs the package torchao, which is not installed"
        found.add("train.moments", message, "pip install async-opd[lowbit]")
    if device == "cpu":
        cause = unused_gpus() or (built_for_cpus() if config.cluster.joins else "")
        if config.cluster.device == "auto" and cause:
            found.notes.append(f"cluster.device: auto is cpu, since {cause}")
        models.head_sizes()
        if config.train.offload != "none":
            found.notes.append("train.offload has no effect: on a CPU all is in host memory")
        if config.train.attention not in ("auto", "sdpa"):
            message = f"{config.train.attention} computes on GPUs only, this run is on a CPU"
            found.add("train.attention", message, "set it to auto")
        check_memory(config, found, models.partial, "cpu", gpus)
        return
    wanted = pools(config)
    total = sum(pool.gpus for pool in wanted)
    joins = config.cluster.joins  # only Ray knows the GPUs of a cluster to join
    build = built_for_cpus()
    if joins and build:  # a config may be checked on another machine than the cluster's
        found.notes.append(f"cluster.device is cuda, and {build}: no run can start from here")
    elif total > gpus and build:
        remedy = "install 'async-opd[gpu]' in a new environment, or set cluster.device: cpu"
        found.add("cluster.device", f"is cuda, and {unused_gpus() or build}", remedy)
    elif total > gpus and not joins:
        terms = " + ".join(pool.term for pool in wanted)
        message = f"the pools take {total} GPUs ({terms}), this machine has {gpus}"
        remedy = "take fewer replicas, or join a larger cluster with cluster.address"
        if shared := sharing(config, gpus):
            how = "share GPUs, in turns, if their memory suffices"
            remedy = f"{how}: {shlex.join(shared)}; or {remedy}"
        found.add("cluster", message, remedy)
    check_memory(config, found, models.partial, "cuda", gpus)
