"""Scored samples in a safetensors file: arrays as tensors, everything else as JSON beside them.

    samples ──► {"0/prompt/token_ids": …, "0/rollout/continuation": …, "0/scores/…": …} + metadata

Reading a file unpickles nothing: other than the queue's batches, which stay within the run's own
processes, a file may have been changed by any process.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from async_opd.core.errors import CheckpointError
from async_opd.core.reports import WrittenFile
from async_opd.core.row import Media
from async_opd.core.samples import EpisodeFacts, Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import Scores
from async_opd.core.sequence import Span
from async_opd.core.stages import TRAINER
from async_opd.files.durable import written_file
from async_opd.files.foreign import Place, foreign

Arrays = dict[str, np.ndarray[Any, Any]]
SCORED_FILE = "scored.safetensors"
FORMAT_ERRORS = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError)
"""Errors of reading a safetensors file that ``write_samples`` did not write."""
KINDS = {kind.__name__: kind for kind in get_args(Scores)}
NOT_STORED = ("prompt", "row", "spans", "version_spans", "encoded", "view")
"""Fields stored separately; ``row``, which only graders read, and ``view``, which only teachers do:
a scored sample is graded."""


def write_samples(path: Path, samples: Sequence[Sample]) -> None:
    """Writes the samples; OSError or SafetensorError if the file cannot be written."""
    arrays, entries = encoded(samples)
    save_file(arrays, path, metadata={"samples": entries})


def read_samples(path: Place) -> list[Sample]:
    """The samples of a file, in order. Raises OSError, ValueError, KeyError or TypeError."""
    arrays, metadata = read_arrays(path)
    return decoded(metadata["samples"], arrays)


def read_arrays(path: Place) -> tuple[Arrays, dict[str, str]]:
    """The arrays of a safetensors file, and its metadata. OSError or SafetensorError."""
    with foreign(path).held() as name, safe_open(name, "np") as file:
        arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return arrays, file.metadata() or {}


def read_metadata(path: Place) -> dict[str, str]:
    """The metadata of a safetensors file alone. OSError or SafetensorError."""
    with foreign(path).held() as name, safe_open(name, "np") as file:
        return file.metadata() or {}


def encoded(samples: Sequence[Sample]) -> tuple[Arrays, str]:
    """The arrays of samples, and the JSON text of everything else."""
    arrays: Arrays = {}
    entries = [_encode(sample, f"{index}/", arrays) for index, sample in enumerate(samples)]
    return arrays, json.dumps(entries)


def decoded(entries: str, arrays: Arrays) -> list[Sample]:
    """The samples of ``encoded``, in order. Raises ValueError, KeyError or TypeError."""
    found = enumerate(json.loads(entries))
    return [_decode(entry, f"{index}/", arrays) for index, entry in found]


def write_scored(folder: Path, samples: Sequence[Sample]) -> WrittenFile:
    """Writes a checkpoint's samples to the disk. CheckpointError if they cannot be written."""
    try:
        write_samples(folder / SCORED_FILE, samples)
        return written_file(folder / SCORED_FILE)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(TRAINER, f"{folder} cannot be written: {error}") from error


def read_scored(folder: Path) -> tuple[Sample, ...]:
    """A checkpoint's samples. CheckpointError if ``write_scored`` did not write them."""
    try:
        return tuple(read_samples(folder / SCORED_FILE))
    except (OSError, SafetensorError, *FORMAT_ERRORS) as error:
        cause = f"{folder / SCORED_FILE} cannot be read: {type(error).__name__}: {error}"
        raise CheckpointError(TRAINER, cause) from error


def _encode(sample: Sample, prefix: str, arrays: Arrays) -> dict[str, Any]:
    rollout = sample.rollout
    return {
        "prompt": _split(rollout.prompt, f"{prefix}prompt/", arrays),
        "rollout": _split(rollout, f"{prefix}rollout/", arrays),
        "scores": _split(sample.scores, f"{prefix}scores/", arrays),
        "spans": rollout.spans,
        "versions": [[span.version, span.start, span.end] for span in rollout.version_spans],
        "kind": type(sample.scores).__name__,
    }


def _split(item: Any, prefix: str, arrays: Arrays) -> dict[str, Any]:
    """Adds a message's arrays to ``arrays``; returns its other fields."""
    plain = {}
    for field in fields(item):
        value = getattr(item, field.name)
        if isinstance(value, np.ndarray):
            arrays[prefix + field.name] = np.ascontiguousarray(value)
        elif field.name not in NOT_STORED:
            plain[field.name] = value
    return plain


def _decode(entry: dict[str, Any], prefix: str, arrays: Arrays) -> Sample:
    arrays_of_prompt = _below(f"{prefix}prompt/", Prompt, arrays)
    prompt = Prompt(**_with_media(entry["prompt"]), **arrays_of_prompt)
    plain = entry["rollout"]
    facts = plain.get("episode")  # files of older versions lack it
    rollout = Rollout(
        **_with_media(plain) | {"episode": facts and EpisodeFacts(*facts)},
        **_below(f"{prefix}rollout/", Rollout, arrays),
        prompt=prompt,
        spans=tuple(Span(int(start), int(end), origin) for start, end, origin in entry["spans"]),
        version_spans=tuple(VersionSpan(*map(int, span)) for span in entry["versions"]),
    )
    kind = KINDS[entry["kind"]]
    return Sample(rollout, kind(**entry["scores"], **_below(f"{prefix}scores/", kind, arrays)))


def _with_media(plain: dict[str, Any]) -> dict[str, Any]:
    """The fields of a message with its references to images; a prompt of older files has none."""
    return plain | {"media": tuple(Media(*one) for one in plain.get("media", ()))}


def _below(prefix: str, kind: Any, arrays: Arrays) -> dict[str, Any]:
    """The arrays of one message, by field."""
    names = [field.name for field in fields(kind)]
    return {name: arrays[prefix + name] for name in names if prefix + name in arrays}
