"""``async_opd replay RUN_DIR --step N``: is the step the same when it is computed again?

    kept batches, checkpoint ──► the trainer's ranks, as in the run ──step by step──► comparison

It starts no engine. Exit codes: 0 bit-equal, 1 not equal or failed, 2 refused.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_opd.config.overrides import add_trust
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.printable import indented, on_one_line
from async_opd.processes.output import write_stderr

if TYPE_CHECKING:
    from async_opd.cluster.proxies import ReplayerProxy
    from async_opd.config.run_config import RunConfig
    from async_opd.tools.replay.kept_run import ReplayPlan
    from trainer.replay.kept_step import Record
    from trainer.replay.replayer import DifferentWeights, Recomputed

EQUAL, DIFFERENT = 0, 1
FIRST = ("loss/total", "train/grad_norm")
"""Of the results that differ these are named first: a step computes them in this order."""
VERSIONS = ("async-opd", "torch", "transformers", "peft", "torchao")


@dataclass(frozen=True)
class DifferentNumber:
    """A result of a step; ``difference`` is the absolute one."""

    name: str
    recorded: float
    computed: float
    difference: float


@dataclass(frozen=True)
class Difference:
    """The difference in the first step that has one: results by FIRST and name, weights by rank."""

    step: int
    numbers: tuple[DifferentNumber, ...]
    weights: tuple[DifferentWeights, ...]
    skipped: str = ""

    def lines(self) -> Iterator[str]:
        """It in words, what was computed first of all first."""
        yield f"the first difference is in step {self.step}"
        if self.skipped:
            yield f"  {self.skipped}"
        for one in self.numbers:
            yield (
                f"  {one.name}: the run had {one.recorded:.9g}, now it is {one.computed:.9g}, "
                f"difference {one.difference:.3g}"
            )
        for found in self.weights:
            yield (
                f"  weights of rank {found.rank}: {found.count} of {found.total} tensors differ, "
                f"first {found.first}, by up to {found.largest:.3g} in its compared entries"
            )


def difference(record: Record, now: Recomputed) -> Difference | None:
    """How a step differs from the record of rank 0; None if all bits are equal.

    Results that only one of both has are not differences: see ``incomparable``.
    """
    before = record.result
    names = sorted(
        before.quantities.keys() & now.quantities.keys(),
        key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name),
    )
    numbers = tuple(
        _number(name, before.quantities[name], now.quantities[name])
        for name in names
        if before.quantities[name] != now.quantities[name]
    )
    skipped = ""
    if before.skipped != now.skipped:
        words = [text or "the step was applied" for text in (before.skipped, now.skipped)]
        skipped = f"skipped: in the run {words[0]}, now {words[1]}"
    if not (numbers or skipped or now.weights):
        return None
    return Difference(now.step, numbers, now.weights, skipped)


def incomparable(record: Record, now: Recomputed) -> list[str]:
    """Results that only one of both has, in words: another version has other metrics."""
    before, after = record.result.quantities.keys(), now.quantities.keys()
    sides = (("the run", before - after), ("this version", after - before))
    return [
        f"only {side} has {len(names)} results, such as {min(names)}: they are not compared"
        for side, names in sides
        if names
    ]


def other_kernels(records: Sequence[Record], now: Recomputed) -> list[str]:
    """Parts of the ranks that ran compiled in one of both and eagerly in the other, in words.

    Their results differ in the last bits. The choice is made by measured times.
    """
    return [
        f"{name} of rank {record.rank}: {was} in the run, {here.get(name, 'eager')} now; a "
        "difference may come from there"
        for record, here in zip(records, now.kernels, strict=True)
        for name, was in record.kernels.items()
        if was != here.get(name, "eager")
    ]


def platform_faults(
    recorded: Sequence[Record], now: Sequence[dict[str, str]]
) -> tuple[list[str], list[str]]:
    """Differences between the machines: reasons to refuse, and warnings (versions)."""
    refused: list[str] = []
    warned: list[str] = []
    if len(recorded) != len(now):
        refused.append(f"the run had {len(recorded)} ranks, here are {len(now)}")
    for record, here in zip(recorded, now, strict=False):
        for key in sorted(record.platform.keys() | here.keys()):
            was, is_ = record.platform.get(key, "none"), here.get(key, "none")
            if was != is_:
                words = f"{key} of rank {record.rank}: the run had {was}, here is {is_}"
                (warned if key in VERSIONS else refused).append(words)
    return refused, warned


def _number(name: str, recorded: str, computed: str) -> DifferentNumber:
    before, now = float.fromhex(recorded), float.fromhex(computed)
    apart = abs(before - now)
    return DifferentNumber(name, before, now, apart if math.isfinite(apart) else math.inf)


@dataclass(frozen=True)
class Outcome:
    """The result of a replay; ``difference`` None: all steps after ``start`` are bit-equal."""

    step: int
    start: int
    computed: int
    difference: Difference | None
    warnings: tuple[str, ...]
    seconds: float


def add_replay(parser: argparse.ArgumentParser) -> None:
    """Computes a training step of a run again, and compares it with the run bit by bit.

    It begins at the checkpoint before the step, and takes the batches since, which a run with
    log.replay: true keeps. Loss, gradient norm, other results and all weights are compared. If they
    differ, it says where first. Starts the trainer's ranks, and no engine.

      async_opd replay runs/quickstart --step 12
    """
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run with log.replay")
    parser.add_argument("--step", type=int, required=True, metavar="N", help="the training step")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    add_trust(parser, "the run directory names")
    parser.set_defaults(command=_replay)


def _replay(given: argparse.Namespace) -> int:
    import uvloop

    from async_opd.config.secrets import Redactor
    from async_opd.tools.replay.kept_run import replay_plan

    plan = replay_plan(Path(given.run_dir), given.step, given.trust_remote_code)
    given.redacted = Redactor(plan.config.model_dump(mode="json", by_alias=True))
    outcome: Outcome = uvloop.run(replay(plan, given.run_dir))
    if given.json:
        document = asdict(outcome) | {"equal": outcome.difference is None}
        print(json.dumps(_finite(document), indent=2, allow_nan=False))
    else:
        for line in _lines(outcome):
            print(on_one_line(given.redacted(line)))
    return EQUAL if outcome.difference is None else DIFFERENT


async def replay(plan: ReplayPlan, where: str) -> Outcome:
    """Computes the plan's steps until one differs. ConfigError if this machine is another one."""
    from async_opd.checks.resources import resolve_device, with_device
    from async_opd.cluster.launch_parts import launch_replayer

    started = time.monotonic()
    config, notes = with_device(_alone(plan))
    for note in notes:
        _say(note)
    async with launch_replayer(config, device=resolve_device(config), notify=_say) as replayer:
        folder = None if plan.folder is None else str(plan.folder.absolute())
        here = await replayer.start(folder)
        refused, warned = platform_faults(plan.steps[-1].records, here)
        if refused:
            remedy = "replay it where the run was"
            raise ConfigError([Problem(where, "--step", one, remedy) for one in refused])
        computed, found, others = await _compared(plan, config, replayer)
    last = plan.start + len(plan.steps)
    seconds = time.monotonic() - started
    return Outcome(last, plan.start, computed, found, (*warned, *others), seconds)


async def _compared(
    plan: ReplayPlan, config: RunConfig, replayer: ReplayerProxy
) -> tuple[int, Difference | None, list[str]]:
    """The number of steps that were computed, the first difference, and warnings."""
    from async_opd.observability.stall import most_tokens
    from async_opd.waiting.liveness import ProgressWatchdog

    watchdog = ProgressWatchdog("replay", config.timeouts.stall_s, "timeouts.stall_s")
    most = most_tokens(config, config.train.batch_size)
    warned: dict[str, None] = {}
    for count, step in enumerate(plan.steps, 1):
        work = replayer.step(step.paths)
        now = await watchdog.within("computed a step", work, replayer.progress, most)
        others = incomparable(step.records[0], now) + other_kernels(step.records, now)
        warned |= dict.fromkeys(others)
        found = difference(step.records[0], now)
        if found is not None:
            return count, found, list(warned)
    return len(plan.steps), None, list(warned)


def _alone(plan: ReplayPlan) -> RunConfig:
    """The run's config with the threads that its ranks had; it writes nothing into the run."""
    config, found = plan.config, plan.steps[-1].records[0].platform.get("threads", "")
    if re.fullmatch("[1-9][0-9]{0,3}", found) is None:
        message = f"the record has {found[:40]!r} as the threads of the rank"
        raise ConfigError.of("--step", message, "name another", str(plan.config.run_dir))
    threads = int(found)
    quiet = config.log.microscope.model_copy(update={"share": 0.0})
    parts = {
        "train": config.train.model_copy(update={"threads": threads}),
        "log": config.log.model_copy(update={"replay": False, "microscope": quiet}),
    }
    return config.model_copy(update=parts)


def _lines(outcome: Outcome) -> list[str]:
    start = f"the checkpoint of step {outcome.start}" if outcome.start else "the run's start"
    how = f"{outcome.computed} steps from {start} on, {outcome.seconds:.0f} s"
    lines = [f"warning: {text}" for text in outcome.warnings]
    if outcome.difference is None:
        return [*lines, f"step {outcome.step} is bit-equal ({how})"]
    return [*lines, f"step {outcome.step} is not bit-equal ({how})", *outcome.difference.lines()]


def _finite(value: Any) -> Any:
    """The document with texts in place of numbers that JSON has not."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return str(value) if isinstance(value, float) and value - value != 0 else value


def _say(text: str) -> None:
    write_stderr(indented(text))
