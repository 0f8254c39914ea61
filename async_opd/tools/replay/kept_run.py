"""The files of a run directory to compute a step again, or why it cannot be.

checkpoints/step_C ─┐
                    ├──► ReplayPlan: steps C+1 … N, each with the files of all ranks
replay/step_C+1 … N ┘
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from async_opd.checkpoint.store import FOLDER, Checkpoints
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import CheckpointError, ConfigError
from async_opd.files.foreign import ForeignPath, foreign
from async_opd.files.kept_steps import KeptFile, kept_files
from async_opd.files.run_format import refuse_no_run
from async_opd.tools.given_run import given_config

if TYPE_CHECKING:
    from trainer.replay.kept_step import Record


@dataclass(frozen=True)
class KeptRecords:
    """A step's files, and what they say, in the order of ranks."""

    paths: tuple[ForeignPath, ...]
    records: tuple[Record, ...]


@dataclass(frozen=True)
class ReplayPlan:
    """The steps after ``start``, with the config that all of them were trained with.

    ``folder`` is the checkpoint of step ``start``; None: the run began with the student's files.
    """

    config: RunConfig
    start: int
    folder: Path | None
    steps: tuple[KeptRecords, ...]


def replay_plan(run_dir: Path, step: int, trusted: bool = False) -> ReplayPlan:
    """How a step is computed again. ConfigError with the reason if it cannot be; OSError.

    ``trusted``: code that the run directory names may run.
    """
    refuse_no_run(run_dir)
    files: defaultdict[int, list[KeptFile]] = defaultdict(list)
    for file in kept_files(run_dir):
        files[file.step].append(file)
    if step not in files:
        raise _not_kept(run_dir, step, sorted(files))
    start, folder = _start(run_dir, step)
    wanted = range(start + 1, step + 1)
    missing = [one for one in wanted if not _complete(files[one])]
    if missing and folder is None:
        raise _refused(
            run_dir, f"no checkpoint before step {step} is left", f"steps {_listed(files)} are kept"
        )
    if missing:
        cause = (
            f"from the checkpoint of step {start} on, batches of steps {_listed(missing)} are not"
        )
        why = "log.replay_gib was exceeded, or they were not written: run.log says so"
        raise _refused(run_dir, f"{cause} kept", f"name another step; {why}")
    steps = tuple(_read(files[one]) for one in wanted)
    config = _config(run_dir, steps, trusted)
    if folder is None and config.cold_start is not None:
        raise _refused(run_dir, "the checkpoint after the cold start is not there", "")
    return ReplayPlan(config, start, folder, steps)


def _start(run_dir: Path, step: int) -> tuple[int, Path | None]:
    """The newest checkpoint before a step, or the start of the run."""
    store = Checkpoints(run_dir / FOLDER, 1)
    for before in reversed([one for one in store.steps() if one < step]):
        try:
            return before, store.load(before).folder
        except CheckpointError as error:
            cause = error.cause
            raise _refused(run_dir, cause, "name a step after the next checkpoint") from error
    return 0, None


def _read(files: Sequence[KeptFile]) -> KeptRecords:
    from trainer.replay.kept_step import read_record

    try:
        records = tuple(read_record(file.path) for file in files)
    except CheckpointError as error:
        raise ConfigError.of("", error.cause, error.remedy, "replay") from error
    first, path = records[0].result, files[0].path
    if any((one.result.step, one.result.part) != (first.step, first.part) for one in records):
        raise _refused(str(path.parent), f"the files of step {first.step} are of several runs", "")
    return KeptRecords(tuple(file.path for file in files), records)


def _config(run_dir: Path, steps: Sequence[KeptRecords], trusted: bool) -> RunConfig:
    """The config of all steps. ConfigError if it changed between them, or may not be used."""
    trees = [step.records[0].config for step in steps]
    changed = sorted({key for tree in trees for key in tree if tree[key] != trees[-1].get(key)})
    if changed:
        cause = f"the run was resumed with other settings of {', '.join(changed)} in between"
        raise _refused(run_dir, cause, "name a step before or a later one")
    config, kept = given_config(run_dir, trusted, trees[-1], replayed=True), len(steps[-1].paths)
    if config.train.ranks != kept:  # each would be a process
        cause = f"its config has {config.train.ranks} ranks, and {kept} have kept the step"
        raise _refused(run_dir, cause, "take the run's own config.yaml")
    return config


def _complete(files: Sequence[KeptFile]) -> bool:
    whole = bool(files) and len(files) == files[0].ranks
    return whole and all(file.rank == rank for rank, file in enumerate(files))


def _not_kept(run_dir: Path, step: int, kept: Sequence[int]) -> ConfigError:
    if kept:
        return _refused(run_dir, f"the batch of step {step} is not kept", f"one of {_listed(kept)}")
    if not load_config(foreign(run_dir) / "config.yaml", recorded=True).log.replay:
        return _refused(run_dir, "log.replay was off: no batches are kept", "set log.replay: true")
    return _refused(run_dir, "it has no kept batches yet", "wait for a step")


def _refused(run_dir: Path | str, cause: str, remedy: str) -> ConfigError:
    return ConfigError.of("--step", cause, remedy, str(run_dir))


def _listed(steps: Sequence[int] | dict[int, list[KeptFile]]) -> str:
    """Numbers in words: ``3, 5 to 9``."""
    parts: list[list[int]] = []
    for one in sorted(steps):
        if parts and parts[-1][1] == one - 1:
            parts[-1][1] = one
        else:
            parts.append([one, one])
    return ", ".join(f"{a}" if a == b else f"{a} to {b}" for a, b in parts)
