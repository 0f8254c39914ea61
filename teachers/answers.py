"""Checks of a replica's answer, before it goes into the queue.

``check`` reads every array of every sample once: decoding and checking take about a millisecond per
megabyte. The trainer can train on every sample that passes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import LengthError, ScoreError, StageError
from async_opd.core.samples import HiddenStates, Int32, Sample

SLACK = 1e-3
"""A log-probability may exceed 0 by this much: rounding in half precision."""


def check(name: str, rollouts: Batch, samples: Batch) -> None:
    """StageError if these cannot be the rollouts' samples; ``name`` is the teacher's.

    The uids must be those of the rollouts, in order, and every sample must pass the checks of
    ``Sample``. Log-probabilities are float32 and at most 0, ids int32, not negative and distinct at
    each position, states of the dtype that the scores name.
    """
    asked = [header.uid for header in rollouts.headers]
    got = [header.uid for header in samples.headers]
    if asked != got:
        raise StageError(
            name, f"asked to score {len(asked)} rollouts, it answered with {len(got)} other samples"
        )
    if sum(header.nbytes for header in samples.headers) != samples.nbytes:
        raise StageError(name, f"its answer of {samples.nbytes} bytes does not fit its headers")
    try:
        found = unpack(Sample, [samples])
    except TypeError as error:
        raise StageError(name, f"it answered with items that are no samples: {error}") from error
    for sample in found:
        _check(name, sample)


def _check(name: str, sample: Sample) -> None:
    uid = sample.rollout.uid
    try:
        Sample(sample.rollout, sample.scores)  # unpickling skips the checks of lengths and NaN
    except (LengthError, ScoreError) as error:
        raise StageError(name, str(error)) from error
    for key, array in vars(sample.scores).items():
        if isinstance(array, np.ndarray):
            dtype, dimensions, sound = _rule(sample, key)
            if array.dtype.name != dtype or array.ndim != dimensions:
                found = f"{key} of {uid} is {array.dtype.name} of shape {array.shape}"
                raise StageError(name, f"{found}, not {dtype} of {dimensions} dimensions")
            if not sound(array):
                found = f"values from {array.min()} to {array.max()}"
                bound = "ids are at least 0" if key == "ids" else f"they are at most {SLACK:g}"
                raise StageError(name, f"{key} of {uid} has {found}, but {bound}")
    ids, logprobs = (getattr(sample.scores, key, None) for key in ("ids", "logprobs"))
    if ids is not None and logprobs is not None and ids.shape != logprobs.shape:
        raise StageError(name, f"{uid} has ids {ids.shape} and logprobs {logprobs.shape}")
    if ids is not None and (twice := repeated(ids)) is not None:
        raise StageError(name, f"{uid} has token {twice[1]} twice at position {twice[0]}")


Rule = tuple[str, int, Callable[[NDArray[Any]], bool]]


def _rule(sample: Sample, key: str) -> Rule:
    """Dtype and number of dimensions of an array of scores, and whether its values are possible."""
    if isinstance(sample.scores, HiddenStates):
        dtype = sample.scores.dtype
        return ("uint16" if dtype == "bfloat16" else dtype, 2, lambda _: True)
    if key == "ids":
        return ("int32", 2, lambda ids: ids.size == 0 or int(ids.min()) >= 0)
    flat = key in ("sampled_logprobs", "rest_logprobs") or not hasattr(sample.scores, "ids")
    return ("float32", 1 if flat else 2, lambda values: values.size == 0 or values.max() <= SLACK)


def repeated(ids: Int32) -> tuple[int, int] | None:
    """Position and id of the first token that a support [R, k] lists twice; None if none is.

    A gradient would count the mass of such a token twice, or not at all.
    """
    ordered = np.sort(ids, axis=1)
    twice = ordered[:, 1:] == ordered[:, :-1]
    if not twice.any():
        return None
    row, column = divmod(int(twice.argmax()), twice.shape[1])
    return row, int(ordered[row, column])
