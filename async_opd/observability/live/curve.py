"""Learning curves as sparklines, and shares as bars, in one line of text each."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = "▁▂▃▄▅▆▇█"
EIGHTHS = " ▏▎▍▌▋▊▉"
MAX_MEANS = 256


class Curve:
    """The values of a metric so far, as means of equally many values each.

    When there are ``MAX_MEANS`` means, neighbours are merged: the memory does not grow.
    """

    def __init__(self) -> None:
        self._means: list[float] = []
        self._each = 1
        self._last: list[float] = []
        self._sum, self._count = 0.0, 0

    def add(self, value: float) -> None:
        """Appends a value; one that is not finite is left out."""
        if not math.isfinite(value):
            return
        self._sum, self._count = self._sum + value, self._count + 1
        self._last.append(value)
        if len(self._last) < self._each:
            return
        self._means.append(_mean(self._last))
        self._last = []
        if len(self._means) == MAX_MEANS:
            self._means = [_mean(self._means[at : at + 2]) for at in range(0, MAX_MEANS, 2)]
            self._each *= 2

    @property
    def mean(self) -> float | None:
        """The mean of all values; None without one."""
        return self._sum / self._count if self._count else None

    @property
    def means(self) -> list[float]:
        """The means in order; the last one may be of fewer values than the others."""
        last = self._last  # another thread may replace it
        return [*self._means, _mean(last)] if last else list(self._means)


def sparkline(values: Sequence[float], width: int) -> str:
    """At most ``width`` blocks, each as high as the mean of its share of the values.

    The lowest value has the lowest block and the highest one the highest; equal values are all low.
    """
    count = min(len(values), width)
    edges = [index * len(values) // count for index in range(count + 1)] if count else [0]
    means = [_mean(values[low:high]) for low, high in pairwise(edges)]
    least, most = min(means, default=0.0), max(means, default=0.0)
    half = most / 2 - least / 2  # most - least may be infinite
    heights = ((mean / 2 - least / 2) / half if half else 0.0 for mean in means)
    return "".join(BLOCKS[round(height * (len(BLOCKS) - 1))] for height in heights)


def bar(share: float | None, width: int) -> str:
    """A bar of ``width`` characters, filled to the share in eighths of a character.

    A share above 0 is never an empty bar; None and values that are not finite are.
    """
    if share is None or not math.isfinite(share):
        return " " * width
    share = min(max(share, 0.0), 1.0)
    eighths = max(round(share * width * 8), int(width > 0 and share > 0))
    whole, rest = divmod(eighths, 8)
    return ("█" * whole + (EIGHTHS[rest] if rest else "")).ljust(width)


def _mean(values: Sequence[float]) -> float:
    return sum(value / len(values) for value in values)
