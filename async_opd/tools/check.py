"""``async_opd check``: what a run would take; or every problem of it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from rich.table import Table

from async_opd.checks.memory_fit import in_gib, memory_rows, this_machine
from async_opd.checks.resources import pools, resolve_device, with_device
from async_opd.config.load import dump_config
from async_opd.config.overrides import add_config, add_run_dir, load_given
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.distributions import REMEDY, untested
from async_opd.core.errors import ConfigError
from async_opd.core.printable import escaped, indented
from async_opd.models.hub import with_cached
from async_opd.models.model_files import ModelError
from async_opd.observability.terminal import table_terminal
from async_opd.prepare import Prepared, prepare
from async_opd.queue.sizes import (
    images_in_words,
    in_mib,
    kept_in_words,
    payloads,
    stored_from,
    traffic,
)
from async_opd.waiting.own_loop import run_to_end

if TYPE_CHECKING:
    from async_opd.models.engine_args import Device


def add_check(parser: argparse.ArgumentParser) -> None:
    """Checks config, models, tokenizers, data and endpoints without starting an engine.

    Prints the config with all defaults, the pools with their GPUs, and the bytes that samples take;
    or every problem that it finds, each with a remedy. Looks for the files of code that the config
    names; without --load it runs none of it, and sends no key. With --episodes 4 it starts the
    student's engine, and plays four episodes of the config's environment.

      async_opd check config.yaml rollout.replicas=4
      async_opd check config.yaml --load
      async_opd check config.yaml --cluster

    With --cluster it also joins the cluster of cluster.address or RAY_ADDRESS, and has each of its
    nodes compared with this one, as before a run: no engine starts, and no GPU is reserved. Without
    --load nodes are asked in their own environment, not in that of cluster.env and runtime_env.
    """
    add_config(parser)
    add_run_dir(parser)
    what = "run the code that the config names (loss, graders, sources, loggers, transport), too, "
    what += "and send servers of teachers their keys"
    parser.add_argument("--load", action="store_true", help=what)
    what = "plays so many episodes of the environment with the student, and prints their turns"
    parser.add_argument("--episodes", type=int, default=0, metavar="N", help=what)
    what = "ask the running cluster, too: its nodes, what a run would place on each, what differs"
    parser.add_argument("--cluster", action="store_true", help=what)
    parser.set_defaults(command=_check)


def _check(given: argparse.Namespace) -> int:
    if given.episodes < 0:
        message = f"found {given.episodes}, which is not a number of episodes"
        raise ConfigError.of("--episodes", message, "for example 4")
    config, notes = load_given(given), list[str]()
    load = given.load or given.episodes > 0
    if given.cluster:
        config, notes = _of_the_cluster(config)
    fetch = given.episodes > 0  # an engine needs the models' files
    ready = check(config, given.config, given.redacted, load, fetch=fetch)
    for note in notes:
        print(indented(given.redacted(f"note: {note}")))
    if given.cluster:
        _print_cluster(ready, given.redacted, load)
    if given.episodes:
        from async_opd.tools.episodes import play

        play(ready, given.config, given.episodes, given.redacted)
    return 0


def _of_the_cluster(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """The config with the device of the cluster to join. ConfigError if it names no cluster."""
    if config.cluster.joins is None:
        message = "no cluster is named: a run would start one on this machine"
        remedy = "set cluster.address=auto, or RAY_ADDRESS, on a node of the cluster"
        raise ConfigError.of("cluster.address", message, remedy, "--cluster")
    config, notes = with_device(config)
    cluster = config.cluster.model_copy(update={"device": resolve_device(config)})
    return config.model_copy(update={"cluster": cluster}), notes


def _print_cluster(ready: Prepared, redacted: Redactor, load: bool) -> None:
    """A table of the cluster's nodes with the processes on each. ConfigError with all problems."""
    from async_opd.cluster.placement.node_checks import survey

    found = run_to_end(survey(ready.config, ready.device, load))
    columns = ("node", "interface", "GPUs", "free", "CPUs", "memory", "/dev/shm", "processes")
    table = Table(*columns, title="nodes of the cluster")
    for node, report, processes in found.nodes:
        sizes = in_gib(node.memory), in_gib(report.shm_mib << 20)
        counts = map(str, (node.gpus, node.free, node.cpus))
        row = (node.name, report.listens or "-", *counts, *sizes, ", ".join(processes) or "-")
        table.add_row(*row)
    table_terminal(whole=True).print(table)
    if found.waits:
        print(escaped(redacted(f"the run would wait for GPUs: {found.waits}")))
    if found.problems:
        raise ConfigError(found.problems)


def check(
    config: RunConfig,
    where: str,
    redacted: Redactor,
    load: bool,
    resume: bool = False,
    fetch: bool = False,
) -> Prepared:
    """Prints the config with all defaults, its pools, memory and bytes; returns it with its rows.

    ``where`` is the config's file; ``load``, ``resume`` and ``fetch`` as for ``prepare``.
    ConfigError with all problems.
    """
    ready = prepare(config, where, fetch=fetch, load=load, resume=resume)
    config, inputs, device = ready.config, ready.inputs, ready.device
    print(escaped(redacted(dump_config(config))))
    table = Table("pool", "replicas", "device each", "model", title="pools")
    for pool in pools(config):
        each = f"{pool.gpus_per_replica} GPU" if device == "cuda" else "CPU"
        each += f", {pool.shares}'s" if pool.shares else ""
        table.add_row(pool.name, pool.count, each, pool.model)
    table_terminal(whole=True).print(table)
    _print_memory(config, device)
    cluster = config.cluster
    if cluster.joins is not None and cluster.device == "auto":
        would = f"a run asks the cluster at {cluster.joins}, and takes cpu if it has no GPU"
        inputs.notes.append(f"cluster.device: auto is taken for {device} here; {would}")
    for note in inputs.notes:
        print(indented(redacted(f"note: {note}")))
    for line in untested():
        print(f"warning: {line}\n    → {REMEDY}")
    print(escaped(_payload(config, device, inputs.max_prompt_tokens)))
    pictured = [row for rows in inputs.checked for row in rows if row.images]
    asked = [(config.teacher_of(row.data_source), row.images) for row in pictured]
    if shown := [(name, sum(one.nbytes for one in images)) for name, images in asked if name]:
        print(escaped(images_in_words(config, shown)))
    training, evaluation = (sum(map(len, rows)) for rows in (inputs.checked, inputs.eval))
    taken, often = config.train.steps * config.train.batch_size // config.rollout.n, ""
    if training and not any(source.stream for source in config.data.train):
        often = f" (the steps take {taken}: each {taken / training:.3g} times)"
    print(f"{training} training prompts{often}, {evaluation} evaluation prompts")
    return ready


def _print_memory(config: RunConfig, device: Device) -> None:
    """A table with the bytes of each pool's processes, as far as models are on this machine."""
    machine = this_machine(config, device)
    title = "memory of each process at its peak"
    if machine.total is not None:
        title += f" ({'each GPU' if device == 'cuda' else 'this host'}: {in_gib(machine.total)})"
    table = Table("pool", "processes", "of", "bytes", "terms", title=title)
    try:
        for row in memory_rows(with_cached(config, [])[0], machine):
            table.add_row(*row)
    except ModelError as error:  # of the hub, and not in its cache
        print(escaped(f"memory: unknown, {error.message}"))
        return
    table_terminal().print(table)


STAYS = "samples of {} and more stay on their teacher's node; the queue has their rollouts"
"""Where ``queue.payloads`` stores samples."""


def _payload(config: RunConfig, device: Device, prompt_tokens: int | None) -> str:
    """The bytes that a step moves and that the queue holds, in words."""
    found = payloads(config, device)
    unknown = sorted(config.teachers.keys() - {one.teacher for one in found})
    most, least = traffic(config, found, prompt_tokens or 0), stored_from(config, device)
    lines = [
        *(
            f"teacher {one.teacher}: {one.kind}, {one.rollout} bytes a response token of a "
            f"rollout, {one.sample} of a sample"
            for one in found
        ),
        *(f"teacher {name}: its model is not on this machine: payload unknown" for name in unknown),
        f"at most, with {config.response_tokens} response tokens: a rollout "
        f"{in_mib(most.rollout)}, a sample {in_mib(most.sample)}; a step moves "
        f"{in_mib(most.step_rollouts)} of rollouts and {in_mib(most.step_samples)} of samples "
        f"through the queue, which holds {in_mib(most.queue)}",
        *([STAYS.format(in_mib(least))] if least is not None else []),
        *([kept_in_words(config, most)] if config.log.replay else []),
    ]
    return "\n".join(lines)
