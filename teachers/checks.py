"""What a replica answered, before anybody relies on it.

Every array of every sample is looked at once: decoding and looking take about a millisecond per
megabyte, and what passes here can be trained.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_opd.core.batch import Batch, unpack_samples
from async_opd.core.errors import LengthError, StageError
from async_opd.core.samples import HiddenStates, Sample

SLACK = 1e-3
"""A log-probability may be so much above 0: rounding in half precision."""
EXPONENT = 0x7F80
"""Bits of a bfloat16 that are all set where it is infinite or not a number."""


def check(name: str, rollouts: Batch, samples: Batch) -> None:
    """StageError if these cannot be the rollouts' samples; ``name`` is the teacher's.

    Compares headers and lengths; log-probabilities must be float32, at most 0 (-inf is a token that
    the teacher excludes) and numbers, ids int32 and not negative, states finite.
    """
    asked = [header.uid for header in rollouts.headers]
    got = [header.uid for header in samples.headers]
    if asked != got:
        raise StageError(
            name, f"asked to score {len(asked)} rollouts, answered with {len(got)} others"
        )
    if sum(header.nbytes for header in samples.headers) != samples.nbytes:
        raise StageError(name, f"its answer of {samples.nbytes} bytes does not fit its headers")
    try:
        found = unpack_samples([samples])
    except TypeError as error:
        raise StageError(name, f"answered with something else than samples: {error}") from error
    for sample in found:
        _check(name, sample)


def _check(name: str, sample: Sample) -> None:
    uid = sample.rollout.uid
    try:
        Sample(sample.rollout, sample.scores)  # lengths
    except LengthError as error:
        raise StageError(name, str(error)) from error
    for key, array in vars(sample.scores).items():
        if isinstance(array, np.ndarray):
            dtypes, dimensions, sound = _rule(sample, key)
            if array.dtype.name not in dtypes or array.ndim != dimensions:
                found = f"{key} of {uid} is {array.dtype.name} of shape {array.shape}"
                raise StageError(
                    name, f"{found}, not {' or '.join(dtypes)} of {dimensions} dimensions"
                )
            if not sound(array):
                raise StageError(name, f"{key} of {uid} has values that cannot be right")
    ids, logprobs = (getattr(sample.scores, key, None) for key in ("ids", "logprobs"))
    if ids is not None and logprobs is not None and ids.shape != logprobs.shape:
        raise StageError(name, f"{uid} has ids {ids.shape} and logprobs {logprobs.shape}")


Rule = tuple[tuple[str, ...], int, Callable[[NDArray[Any]], bool]]


def _rule(sample: Sample, key: str) -> Rule:
    """Types, dimensions and values that an array of scores may have."""
    if isinstance(sample.scores, HiddenStates):
        if sample.scores.dtype == "bfloat16":
            return (("uint16",), 2, lambda bits: not (bits & EXPONENT == EXPONENT).any())
        return ((sample.scores.dtype,), 2, lambda states: bool(np.isfinite(states).all()))
    if key == "ids":
        return (("int32",), 2, lambda ids: bool((ids >= 0).all()))
    flat = key == "sampled_logprobs" or not hasattr(sample.scores, "ids")
    return (("float32",), 1 if flat else 2, lambda values: bool((values <= SLACK).all()))
