"""Fits the parameters of ``async_opd.config.sections.plan`` to measured sums.

Every fit keeps the measured total: noise affects the split into a fixed and a proportional part,
but not the predicted total of the measured run.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from async_opd.tools.plan.measure.lengths import Lengths
from async_opd.tools.plan.setting import mean_length, phi

Floats = NDArray[np.float64]

SPREAD = 0.05
"""Below this coefficient of variation a fixed and a proportional part cannot be separated."""


def fixed_and_slope(x: Floats, y: Floats, weights: Floats) -> tuple[float, float]:
    """y ≈ fixed + slope · x, both at least 0, by weighted least squares through the mean point.

    A part that would be negative is 0, and the other part keeps the mean. If x varies less than
    ``SPREAD``, fixed is 0.
    """
    total = weights.sum()
    mean_x, mean_y = float((weights * x).sum() / total), float((weights * y).sum() / total)
    deviation = x - mean_x
    variance = float((weights * deviation**2).sum() / total)
    if mean_x == 0:
        return mean_y, 0.0
    if math.sqrt(variance) < SPREAD * mean_x:
        return 0.0, mean_y / mean_x
    slope = float((weights * deviation * (y - mean_y)).sum() / total) / variance
    slope = min(max(slope, 0.0), mean_y / mean_x)
    return max(mean_y - slope * mean_x, 0.0), slope


def batches_and_tokens(seconds: Floats, batches: Floats, tokens: Floats) -> tuple[float, float]:
    """(overhead of a batch, tokens per second): seconds ≈ overhead · batches + tokens / rate.

    Both sides are divided by the tokens, which weight the intervals; the fixed part of
    ``fixed_and_slope`` is then 1 / rate.
    """
    kept = tokens > 0
    seconds, batches, tokens = seconds[kept], batches[kept], tokens[kept]
    fixed, overhead = fixed_and_slope(batches / tokens, seconds / tokens, tokens)
    least = seconds.sum() / tokens.sum() / 20  # at most 20 times the speed with its overhead
    if fixed < least:
        fixed = least
        overhead = max((seconds.sum() - fixed * tokens.sum()) / batches.sum(), 0.0)
    return overhead, 1 / fixed


def lengths_of(mean: float, std: float, most: int) -> Lengths:
    """The log-normal lengths, cut at ``most``, that have this mean and standard deviation.

    Inner search: the mean of the uncut distribution for a given sigma; outer search: sigma.
    """
    if std < 1e-3 * mean or mean >= most:
        return Lengths(min(mean, most), 0.0, most)
    sigma = _bisect(0.0, 4.0, lambda sigma: _cut_std(_with_mean(mean, sigma, most)) < std)
    return _with_mean(mean, sigma, most)


def _with_mean(mean: float, sigma: float, most: int) -> Lengths:
    def lengths(log_factor: float) -> Lengths:
        return Lengths(mean * math.exp(log_factor), sigma, most)

    return lengths(_bisect(0.0, math.log(1e4), lambda log: mean_length(lengths(log)) < mean))


def _bisect(low: float, high: float, too_low: Callable[[float], bool]) -> float:
    """The value between ``low`` and ``high`` at which ``too_low`` becomes false."""
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return (low + high) / 2


def _cut_std(lengths: Lengths) -> float:
    """E[min(X, c)²] is m²·e^(σ²)·Φ(d - 2σ) + c²·(1 - Φ(d)), with d as in ``mean_length``."""
    sigma, most = lengths.sigma, lengths.most
    d = (math.log(most) - math.log(lengths.mean)) / sigma + sigma / 2
    square = math.exp(2 * math.log(lengths.mean) + sigma**2) * phi(d - 2 * sigma)
    square += most**2 * (1 - phi(d))
    return math.sqrt(max(square - mean_length(lengths) ** 2, 0.0))
