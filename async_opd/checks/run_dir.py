"""The run directory: whether it can be made, and whether its disk has room for the run's files."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from async_opd.checkpoint.earlier_run import is_completed
from async_opd.checks.memory_fit import in_gib
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import Problem
from async_opd.files.absent import nearest
from async_opd.memory.pools import frozen_entries
from async_opd.models.adapted import trained_entries
from async_opd.models.json_files import read_json
from async_opd.models.model_files import ModelError
from async_opd.models.model_size import ModelSize
from async_opd.models.tokenizer import text_settings

MOMENTS = {"float32": 8, "bfloat16": 4, "8bit": 2}
"""Bytes of both moments of a trained parameter, at least; a float32 weight takes 4 more."""
MAKE_ROOM = "make room, choose another run_dir, or lower checkpoint.keep"
ANOTHER = "choose another run_dir, in a folder that you may write to"
GROWING = ("checkpoints", "model", "best")
"""Large folders of a run directory, whose bytes a resumed run does not need again."""


@dataclass(frozen=True)
class RunDirSpace:
    """Bytes of the run directory's disk: ``free``, and ``needed`` by the large files of a run.

    ``terms`` are those of ``needed``; None where the student is not on this machine, and ``why``.
    ``most`` has the bounds of records besides, whose oldest are removed.
    """

    free: int
    needed: int | None
    most: int = 0
    terms: str = ""
    why: str = ""


def run_dir_of(config: RunConfig) -> Path:
    """The run directory, or that of all runs, whose name has the time of the start."""
    return Path(config.run_dir or "runs").absolute()


def unwritable(run_dir: Path) -> str:
    """Why the directory cannot be made, or its files not written; empty if they can.

    Where the file system has no size, as in /proc, a folder is made there, and removed.
    """
    try:
        os.lstat(run_dir)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except (OSError, ValueError) as error:  # a name that is too long, or has a NUL
        return f"{str(run_dir)[:200]!r} cannot be written: {error}"
    there = _there(run_dir)
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        return f"{run_dir} cannot be written: {there} is not a folder that you may write to"
    if not shutil.disk_usage(there).total:
        try:
            tempfile.TemporaryDirectory(dir=there).cleanup()
        except OSError as error:
            return f"{run_dir} cannot be written: {error}"
    return ""


def space_of(config: RunConfig, free: int | None = None, resume: bool = False) -> RunDirSpace:
    """The space of a run directory that can be written. ``free``: by default as the disk says.

    ``resume``: the files of the run so far are a part of what it needs.
    """
    run_dir = run_dir_of(config)
    usage = shutil.disk_usage(_there(run_dir))
    free = (usage.free if usage.total else 1 << 62) if free is None else free
    log = config.log
    bounds = {
        "log.replay": int(log.replay * log.replay_gib * 2**30),
        "log.microscope": int((log.microscope.share > 0) * log.microscope.max_mib * 2**20),
    }
    try:
        terms = _terms(config)
    except (ModelError, OSError, ValueError) as error:
        return RunDirSpace(free, None, why=str(getattr(error, "message", error)))
    needed = sum(terms.values())
    if resume and needed > free:
        needed -= min(needed, _bytes_of(run_dir))
    listed = ", ".join(
        f"{name} {in_gib(nbytes)}" for name, nbytes in (terms | bounds).items() if nbytes
    )
    return RunDirSpace(free, needed, needed + sum(bounds.values()), listed)


def run_dir_problems(config: RunConfig, where: str, resume: bool) -> Iterator[Problem]:
    """The problem of a run directory in which no run could work to its end, if there is one."""
    run_dir = run_dir_of(config)
    if resume and config.checkpoint.mirror is None and not run_dir.exists():
        message = f"{run_dir} does not exist, and --resume continues the run in it"
        yield Problem("command line", "run_dir", message, nearest(run_dir))
        return
    if fault := unwritable(run_dir):
        yield Problem(where, "run_dir", fault, ANOTHER)
        return
    if resume and is_completed(run_dir):
        return
    space = space_of(config, resume=resume)
    if space.needed is not None and space.needed > space.free:
        has = f"{run_dir} has {in_gib(space.free)}, the run needs {in_gib(space.needed)}"
        yield Problem(where, "run_dir", f"{has} ({space.terms})", MAKE_ROOM)


def _there(path: Path) -> Path:
    """The path, or the nearest one above it that exists."""
    return next(folder for folder in (path, *path.parents) if os.path.lexists(folder))


def _terms(config: RunConfig) -> dict[str, int]:
    """Bytes of a run's large files, by what they are. ModelError for a student of the hub."""
    student, train, settings = config.student.model, config.train, config.checkpoint
    if not os.path.isdir(student):
        raise ModelError("the student's files are not on this machine", "download it first")
    size = ModelSize.of_weights(student)
    parameters = size.floats
    if train.lora is None:
        trained = parameters - frozen_entries(config, size)
    else:
        trained = trained_entries(student, train.lora)
    kept = settings.keep + 1
    if settings.keep_best is None:
        between = config.steps_between(settings)
        periodic = math.ceil(config.train.steps / between) if between else 1
        kept = min(kept, periodic + (config.cold_start is not None))
    kept += settings.keep_best is not None
    kept += 2 * (config.guardrail.mode == "roll_back")
    models = 1 + (settings.keep_best is not None)
    return {
        f"{kept} checkpoint{'s' * (kept != 1)}, one of them being written": kept
        * (4 + MOMENTS[train.moments])
        * trained,
        "the trained model": models * _bytes_of_entry(config) * parameters,
    }


def _bytes_of_entry(config: RunConfig) -> int:
    """Bytes of an entry of the trained model, as ``train.export_dtype`` says."""
    wanted: str = config.train.export_dtype
    if wanted == "auto":
        settings = text_settings(read_json(Path(config.student.model) / "config.json"))
        wanted = str(settings.get("dtype") or settings.get("torch_dtype"))
    return 2 if wanted in ("bfloat16", "float16") else 4


def _bytes_of(run_dir: Path) -> int:
    """Bytes of the large files that an earlier process of the run has left."""
    files = (file for name in GROWING for file in (run_dir / name).rglob("*"))
    return sum(file.lstat().st_size for file in files)
