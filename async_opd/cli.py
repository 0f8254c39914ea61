"""The command line: parses, prints, exits.

    async_opd run CONFIG [a.b.c=value …] [--staleness-threshold F] [--sync-steps N] [--run-dir D]
                  [--resume]          goes on after the newest checkpoint in D
    async_opd check CONFIG …          prints the resolved config and the pools
    async_opd plan CONFIG|RUN_DIR … [--gpus N] [--out DIR] [--json]
                                      predicts throughput and staleness, advises sizes

Exit codes: 0 done; 1 the run failed; 2 bad config or usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from async_opd import __version__
from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.errors import AsyncOPDError, ConfigError, Problem
from async_opd.core.printable import escaped, indented
from async_opd.processes.output import write_stderr

if TYPE_CHECKING:
    from async_opd.models.engine_args import Device

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit code."""
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    for text in rest:  # argparse leaves overrides after an option to us
        if text.startswith("-"):
            parser.error(Redactor()(f"unrecognized arguments: {text}"))
    arguments.overrides += rest
    arguments.redacted = Redactor()
    try:
        return int(arguments.command(arguments))
    except ConfigError as error:
        write_stderr(indented(arguments.redacted(str(error))))
        return BAD_INPUT
    except (AsyncOPDError, OSError) as error:  # before a run has its own record to say it in
        write_stderr(indented(arguments.redacted(f"failed: {error}")))
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="async_opd", description=__doc__.split("\n")[0])
    parser.add_argument("--version", action="version", version=f"async_opd {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, text in (
        ("run", _run, "distil: rollouts, scoring and training at the same time"),
        ("check", _check, "check the input, print the resolved config and the pools"),
        ("plan", _plan, "predict throughput and staleness, advise pool sizes and threshold"),
    ):
        sub = commands.add_parser(name, help=text, description=text)
        sub.set_defaults(command=command)
        what = (
            "YAML file" if name != "plan" else "YAML file with a plan section, or a run directory"
        )
        sub.add_argument("config", help=what)
        sub.add_argument("overrides", nargs="*", metavar="a.b.c=value", help="overrides")
        sub.add_argument(
            "--staleness-threshold", metavar="F", help="async.staleness_threshold: s in (v+1+s)·K·B"
        )
        sub.add_argument("--sync-steps", metavar="N", help="async.sync_steps: steps between syncs")
        if name != "plan":
            sub.add_argument("--run-dir", metavar="D", help="run_dir: where results go")
            if name == "run":
                text = "go on after the newest checkpoint of the run directory"
                sub.add_argument("--resume", action="store_true", help=text)
            continue
        sub.add_argument("--gpus", type=int, metavar="N", help="GPUs to split; default: as many")
        sub.add_argument("--out", metavar="DIR", help="where plan.svg goes; default: the run's")
        sub.add_argument("--json", action="store_true", help="print one JSON document instead")
    return parser


def _refuse(problems: list[Problem]) -> None:
    """Nothing starts with a bad input."""
    if problems:
        raise ConfigError(problems)


def _load(arguments: argparse.Namespace) -> RunConfig:
    from async_opd.config.load import load_config

    config = load_config(arguments.config, _overrides(arguments))
    arguments.redacted = Redactor(config.model_dump(mode="json", by_alias=True))
    return config


def _overrides(arguments: argparse.Namespace) -> list[str]:
    run_dir = getattr(arguments, "run_dir", None)
    flags = {
        "async.staleness_threshold": arguments.staleness_threshold,
        "async.sync_steps": arguments.sync_steps,
        "run_dir": run_dir and json.dumps(run_dir),
    }
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    return [*arguments.overrides, *given]


def _check(arguments: argparse.Namespace) -> int:
    from rich.table import Table

    from async_opd.checks.preflight import preflight
    from async_opd.checks.resources import pools, resolve_device
    from async_opd.config.load import dump_config
    from async_opd.models.hub import naming_faults
    from async_opd.observability.console import terminal_on
    from teachers.endpoint.check import check_endpoints

    config = _load(arguments)
    named = naming_faults(config, arguments.config)
    inputs = preflight(config, arguments.config)
    _refuse(named + inputs.problems or check_endpoints(config, arguments.config))
    print(escaped(arguments.redacted(dump_config(config))))
    device = resolve_device(config)
    table = Table("pool", "replicas", "device each", "model", title="pools")
    for pool in pools(config):
        each = f"{pool.gpus_per_replica} GPU" if device == "cuda" else "CPU"
        each += f", {pool.shares}'s" if pool.shares else ""
        table.add_row(pool.name, str(pool.replicas), each, pool.model)
    terminal_on(None).print(table)
    for note in inputs.notes:
        print(indented(arguments.redacted(f"note: {note}")))
    print(escaped(_payload(config, device, inputs.max_prompt_tokens)))
    training, evaluation = (sum(map(len, rows)) for rows in (inputs.checked, inputs.eval))
    print(f"{training} training prompts, {evaluation} evaluation prompts")
    return OK


def _payload(config: RunConfig, device: Device, prompt_tokens: int | None) -> str:
    """What a step moves, and what the queue holds."""
    from async_opd.queue.sizes import in_mib, payloads, traffic

    found = payloads(config, device)
    unknown = sorted(config.teachers.keys() - {one.teacher for one in found})
    most = traffic(config, found, prompt_tokens or 0)
    lines = [
        *(
            f"teacher {one.teacher}: {one.kind}, {one.rollout} bytes a response token of a "
            f"rollout, {one.sample} of a sample"
            for one in found
        ),
        *(f"teacher {name}: its model is not here, so its payload is unknown" for name in unknown),
        f"at most, with {config.rollout.max_tokens} response tokens: a rollout "
        f"{in_mib(most.rollout)}, a sample {in_mib(most.sample)}; a step moves "
        f"{in_mib(most.step_rollouts)} of rollouts and {in_mib(most.step_samples)} of samples "
        f"through the queue, which holds {in_mib(most.queue)}",
    ]
    return "\n".join(lines)


def _plan(arguments: argparse.Namespace) -> int:
    from async_opd.plan.command import plan

    plan(
        arguments.config,
        _overrides(arguments),
        gpus=arguments.gpus,
        out=arguments.out,
        as_json=arguments.json,
    )
    return OK


def _run(arguments: argparse.Namespace) -> int:
    from async_opd.checks.preflight import preflight
    from async_opd.models.hub import localize
    from teachers.endpoint.check import check_endpoints

    config = _load(arguments)
    if arguments.resume and config.run_dir is None:
        message, remedy = "--resume needs to know which run", "add --run-dir D"
        raise ConfigError([Problem("command line", "run_dir", message, remedy)])
    config = localize(config, arguments.config)
    inputs = preflight(config, arguments.config)
    _refuse(inputs.problems or check_endpoints(config, arguments.config))
    from async_opd.run import run

    return run(config, inputs, arguments.resume)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        sys.path.pop(0)  # the working directory, which python -m puts there
    sys.exit(main())
