"""Checks of a replica's answer, before it goes into the queue.

``check`` reads every array of every sample once: decoding and checking take about a millisecond per
megabyte. The trainer can train on every sample that passes.
"""

from __future__ import annotations

import numpy as np

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import LengthError, ScoreError, StageError
from async_opd.core.samples import Sample
from async_opd.core.scores import HiddenStates, SampledLogprobs, Scores
from async_opd.core.sequence import Int32

SLACK = 1e-3
"""A log-probability may exceed 0 by this much: rounding in half precision."""


def check(name: str, rollouts: Batch, samples: Batch) -> None:
    """StageError if these cannot be the rollouts' samples; ``name`` is the teacher's.

    The uids must be those of the rollouts, in order, and every sample must pass the checks of
    ``Sample``. Log-probabilities are float32 and at most 0, ids int32, not negative and distinct at
    each position, states of the dtype that the scores name. Payloads that are stored elsewhere were
    checked where they were made.
    """
    asked = [header.uid for header in rollouts.headers]
    got = [header.uid for header in samples.headers]
    if asked != got:
        raise StageError(
            name, f"asked to score {len(asked)} rollouts, it answered with {len(got)} other samples"
        )
    if any(samples.stored):
        return
    if sum(header.nbytes for header in samples.headers) != samples.nbytes:
        raise StageError(name, f"its answer of {samples.nbytes} bytes does not fit its headers")
    try:
        found = unpack(Sample, [samples])
    except TypeError as error:
        raise StageError(name, f"it answered with items that are not samples: {error}") from error
    for sample in found:
        _check(name, sample)


def _check(name: str, sample: Sample) -> None:
    uid, scores = sample.rollout.uid, sample.scores
    try:
        Sample(sample.rollout, scores)  # unpickling skips the checks of lengths and NaN
    except (LengthError, ScoreError) as error:
        raise StageError(name, str(error)) from error
    arrays = {key: array for key, array in vars(scores).items() if isinstance(array, np.ndarray)}
    for key, array in arrays.items():
        dtype, dimensions = _expected(scores, key)
        if array.dtype.name != dtype or array.ndim != dimensions:
            found = f"{key} of {uid} is {array.dtype.name} of shape {array.shape}"
            raise StageError(name, f"{found}, not {dtype} of {dimensions} dimensions")
        if array.size and key == "ids" and array.min() < 0:
            raise StageError(name, f"{key} of {uid} has {array.min()}, ids are at least 0")
        if array.size and key.endswith("logprobs") and not array.max() <= SLACK:
            raise StageError(name, f"{key} of {uid} has {array.max():g}, which is above 0")
    ids, logprobs = arrays.get("ids"), arrays.get("logprobs")
    if ids is not None and logprobs is not None and ids.shape != logprobs.shape:
        raise StageError(name, f"{uid} has ids {ids.shape} and logprobs {logprobs.shape}")
    if ids is not None and (twice := repeated(ids)) is not None:
        raise StageError(name, f"{uid} has token {twice[1]} twice at position {twice[0]}")


def _expected(scores: Scores, key: str) -> tuple[str, int]:
    """Dtype and number of dimensions of an array of scores."""
    if isinstance(scores, HiddenStates):
        return "uint16" if scores.dtype == "bfloat16" else scores.dtype, 2
    if key == "ids":
        return "int32", 2
    support = key == "logprobs" and not isinstance(scores, SampledLogprobs)
    return "float32", 2 if support else 1


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
