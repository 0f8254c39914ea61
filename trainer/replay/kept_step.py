"""The file of a kept step: a rank's inputs and results.

    record    JSON: headers of the whole batch, loss and other results, digests of weights, config
    samples   those of this rank's micro-batches, as ``trainer.saving.sample_file`` has them
    entries   some numbers of each weight after the step
    sha256    of all of these: a file that was cut off or damaged is found when it is read

The whole batch decides the micro-batches (``Learner.plan``), so that its headers are enough to make
them again. Reading a file unpickles nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from async_opd.core.errors import CheckpointError
from async_opd.core.nesting import MAX_DEPTH, too_deep
from async_opd.core.samples import Header, Sample
from async_opd.core.stages import TRAINER
from async_opd.files.foreign import Place
from trainer.saving.sample_file import (
    FORMAT_ERRORS,
    Arrays,
    decoded,
    encoded,
    read_arrays,
    read_metadata,
)

ENTRIES_KEY = "entries"
READ_ERRORS = (OSError, SafetensorError, *FORMAT_ERRORS)
_REMEDY = "replay a step after the next checkpoint"


@dataclass(frozen=True)
class StepResult:
    """Rank 0's message to all ranks about a trained step.

    ``quantities`` are its metrics that depend on nothing but weights and batch, as ``float.hex``
    texts: they are equal only for equal bits, and can be NaN. ``lr_factor`` multiplied its learning
    rate. ``skipped`` is the reason why the step changed no weights, else ''. ``part`` is another
    text in each process of rank 0: it distinguishes files of two parts of a run. ``unchanged``: the
    weights before it were those of its version, by which samples are fresh.
    """

    step: int
    part: str
    headers: tuple[Header, ...]
    quantities: dict[str, str]
    lr_factor: float
    skipped: str = ""
    unchanged: bool = False


@dataclass(frozen=True)
class Record:
    """The content of a rank's file of a step, beside its samples.

    ``version`` is the weight version that the step began with, ``platform`` what the rank computed
    on and with, ``digests`` those of its weights after the step; ``config`` is the run's.
    ``kernels``: ``PlacedStudent.kernels`` of the step; none in a file of an older version.
    """

    result: StepResult
    rank: int
    ranks: int
    version: int
    platform: dict[str, str]
    digests: dict[str, str]
    config: dict[str, Any]
    kernels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class KeptStep:
    """The content of a file."""

    record: Record
    samples: tuple[Sample, ...]
    entries: np.ndarray[Any, Any]


def quantities_of(metrics: Mapping[str, float]) -> dict[str, str]:
    """The metrics of a step that its weights and its batch alone decide, as ``float.hex`` texts."""
    decided = {"train/grad_norm", "train/lr"}
    return {
        name: float(value).hex()
        for name, value in sorted(metrics.items())
        if name in decided or not name.startswith(("train/", "microscope/"))
    }


def write_kept(path: Path, kept: KeptStep) -> int:
    """Writes a file under another name, then renames it; returns its bytes.

    OSError or SafetensorError: there is no file of the step.
    """
    arrays, samples = encoded(kept.samples)
    arrays[ENTRIES_KEY] = kept.entries
    import msgspec  # which a learner that keeps nothing does without

    record = msgspec.json.encode(kept.record).decode()
    metadata = {"record": record, "samples": samples}
    part = path.with_name(f".{path.name}.partial")
    part.unlink(missing_ok=True)  # save_file of safetensors 0.5 writes through a link
    try:
        save_file(arrays, part, metadata=metadata | {"sha256": _digest(arrays, metadata)})
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    return path.stat().st_size


def read_record(path: Place) -> Record:
    """The record of a file alone. CheckpointError."""
    try:
        return _decoded(read_metadata(path)["record"])
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def read_kept(path: Place) -> KeptStep:
    """A file's content. CheckpointError if it was damaged, or ``write_kept`` did not write it."""
    try:
        arrays, metadata = read_arrays(path)
        found = metadata.pop("sha256")
        if found != _digest(arrays, metadata):
            raise ValueError("it was changed or cut off after it was written")
        entries = arrays.pop(ENTRIES_KEY)
        return KeptStep(
            _decoded(metadata["record"]), tuple(decoded(metadata["samples"], arrays)), entries
        )
    except READ_ERRORS as error:
        raise _unreadable(path, error) from error


def _decoded(text: str) -> Record:
    """ValueError for another text."""
    import msgspec

    found = msgspec.json.decode(text, type=Record)
    if too_deep(found.config):
        raise ValueError(f"its config has more than {MAX_DEPTH} values inside of each other")
    return found


def _digest(arrays: Arrays, metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256()
    for name, array in sorted(arrays.items()):
        digest.update(f"{name} {array.dtype} {array.shape};".encode())
        digest.update(np.ascontiguousarray(array).data)
    for name, text in sorted(metadata.items()):
        digest.update(f"{name};{text};".encode())
    return digest.hexdigest()


def _unreadable(path: Place, error: Exception) -> CheckpointError:
    cause = f"{path} cannot be read: {type(error).__name__}: {error}"
    return CheckpointError(TRAINER, cause, _REMEDY)
