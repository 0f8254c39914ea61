"""``async_opd check``: what a run would take, printed; or every problem of its input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.table import Table

from async_opd.api import checked
from async_opd.checks.memory_fit import in_gib, memory_rows, this_machine
from async_opd.checks.preflight import Inputs
from async_opd.checks.resources import pools, resolve_device
from async_opd.config.device_defaults import resolved
from async_opd.config.load import dump_config
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.printable import escaped, indented
from async_opd.models.hub import with_cached
from async_opd.models.model_files import ModelError
from async_opd.observability.terminal import terminal_on
from async_opd.queue.sizes import in_mib, kept_in_words, payloads, traffic

if TYPE_CHECKING:
    from async_opd.models.engine_args import Device


def check(config: RunConfig, where: str, redacted: Redactor) -> tuple[RunConfig, Inputs]:
    """Prints the config with all defaults, its pools, memory and bytes; returns it with its rows.

    ``where`` is the config's file. ConfigError with all problems.
    """
    config, inputs = checked(config, where)
    device = resolve_device(config)
    complete = resolved(config, device)
    print(escaped(redacted(dump_config(complete))))
    table = Table("pool", "replicas", "device each", "model", title="pools")
    for pool in pools(config):
        each = f"{pool.gpus_per_replica} GPU" if device == "cuda" else "CPU"
        each += f", {pool.shares}'s" if pool.shares else ""
        table.add_row(pool.name, str(pool.replicas), each, pool.model)
    terminal_on(None).print(table)
    _print_memory(config, device)
    for note in inputs.notes:
        print(indented(redacted(f"note: {note}")))
    print(escaped(_payload(config, device, inputs.max_prompt_tokens)))
    training, evaluation = (sum(map(len, rows)) for rows in (inputs.checked, inputs.eval))
    print(f"{training} training prompts, {evaluation} evaluation prompts")
    return complete, inputs


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
    terminal_on(None).print(table)


def _payload(config: RunConfig, device: Device, prompt_tokens: int | None) -> str:
    """The bytes that a step moves and that the queue holds, in words."""
    found = payloads(config, device)
    unknown = sorted(config.teachers.keys() - {one.teacher for one in found})
    most = traffic(config, found, prompt_tokens or 0)
    lines = [
        *(
            f"teacher {one.teacher}: {one.kind}, {one.rollout} bytes a response token of a "
            f"rollout, {one.sample} of a sample"
            for one in found
        ),
        *(f"teacher {name}: its model is not on this machine: payload unknown" for name in unknown),
        f"at most, with {config.rollout.max_tokens} response tokens: a rollout "
        f"{in_mib(most.rollout)}, a sample {in_mib(most.sample)}; a step moves "
        f"{in_mib(most.step_rollouts)} of rollouts and {in_mib(most.step_samples)} of samples "
        f"through the queue, which holds {in_mib(most.queue)}",
        *([kept_in_words(config, most)] if config.log.replay else []),
    ]
    return "\n".join(lines)
