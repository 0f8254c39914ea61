"""Whether run directory and mirror can be written, and the former has room for a run's files."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from secrets import token_hex

from async_opd.checkpoint.run_copies import RunCopies
from async_opd.checks.memory_fit import in_gib
from async_opd.config.run_config import RunConfig
from async_opd.files.remote import RemoteFile
from async_opd.models.model_files import ModelError
from async_opd.models.model_size import ModelSize
from async_opd.tools.doctor.finding import Finding

TOPIC = "disk"
CHECKPOINT_BYTES, MODEL_BYTES = 12, 4
"""At most, for each parameter: float32 weights and both moments; float32 weights."""
REMEDY = "make room, choose another run_dir, or lower checkpoint.keep"


def disk(config: RunConfig, free: int | None = None) -> Iterator[Finding]:
    """Findings about the run directory and ``checkpoint.mirror``.

    ``free``: bytes left in the run directory, by default as the disk says.
    """
    if config.checkpoint.mirror is not None:
        yield _mirror(config.checkpoint.mirror)
    run_dir = Path(config.run_dir or "runs").absolute()
    there = next(folder for folder in (run_dir, *run_dir.parents) if folder.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        message = f"{run_dir} cannot be written: {there} is not a folder that you may write to"
        yield Finding(TOPIC, "error", message, "choose another run_dir")
        return
    free = shutil.disk_usage(there).free if free is None else free
    try:
        needed, terms = _needed(config)
    except (ModelError, OSError) as error:
        message = f"{run_dir} has {in_gib(free)}; the run's need is not known: {error}"
        yield Finding(TOPIC, "warning", message, REMEDY)
        return
    found = f"{run_dir} has {in_gib(free)}, the run keeps at most {in_gib(needed)} ({terms})"
    yield Finding(TOPIC, "ok", found) if needed <= free else Finding(TOPIC, "error", found, REMEDY)


def _mirror(url: str) -> Finding:
    """Writes a small file to the mirror, and reads and removes it."""
    probe = RemoteFile(url) / f"doctor-{token_hex(8)}"
    try:
        probe.write(b"probe")
        probe.read(len(b"probe"))
        probe.remove()
        newest = RunCopies.at(url).newest()
    except OSError as error:
        remedy = "look at the credentials in this environment, and their rights to write and remove"
        return Finding(TOPIC, "error", f"{url} (checkpoint.mirror) cannot be used: {error}", remedy)
    has = "no checkpoint" if newest is None else f"step {newest[0]} of a run, for --resume"
    return Finding(TOPIC, "ok", f"{url} (checkpoint.mirror) can be written; it has {has}")


def _needed(config: RunConfig) -> tuple[int, str]:
    """Bytes of a run's large files, with the terms. ModelError for a student of the hub."""
    if not os.path.isdir(config.student.model):
        raise ModelError("the student's files are not on this machine", "download it first")
    parameters = ModelSize.of_weights(config.student.model).floats
    settings, log = config.checkpoint, config.log
    kept = settings.keep + 1 + (settings.keep_best is not None)
    kept += 2 * (config.guardrail.mode == "roll_back")
    models = 1 + (settings.keep_best is not None)
    terms = {
        f"{kept} checkpoints, one of them being written": kept * CHECKPOINT_BYTES * parameters,
        "the trained model": models * MODEL_BYTES * parameters,
        "log.replay": int(log.replay * log.replay_gib * 2**30),
        "log.microscope": int((log.microscope.share > 0) * log.microscope.max_mib * 2**20),
    }
    listed = ", ".join(f"{name} {in_gib(nbytes)}" for name, nbytes in terms.items() if nbytes)
    return sum(terms.values()), listed
