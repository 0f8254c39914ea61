"""A live view's content: the newest values by pool, topic and data source, and their curves.

Curves become sparklines and shares become bars, each in one line of text.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from async_opd.config.run_config import RunConfig
from async_opd.core.printable import on_one_line
from async_opd.core.stages import DEAD, STALE
from async_opd.observability.metric_catalogue import live_values
from async_opd.observability.terminal import duration
from async_opd.waiting.waits import WAITING

MESSAGES = 5
MESSAGE_CHARACTERS = 1000
"""The longest message; run.log has all of it."""
MAX_CURVES = 64
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


@dataclass(frozen=True)
class PoolRow:
    """A pool's newest values; None for a value that it has not reported.

    ``busy`` is the share of the last step's time, between 0 and 1, ``in_flight`` the requests or
    calls under way. The curves are of the steps so far. Of a run that has ended, whose last steps
    drain the pools, ``busy`` and ``tokens_per_s`` are means over its steps.
    """

    name: str
    tokens_per_s: float | None
    busy: float | None
    in_flight: float | None
    waits_for: str
    busy_curve: Curve
    tokens_curve: Curve


@dataclass(frozen=True)
class TopicRow:
    """Samples of a topic: ready, and leased to a consumer."""

    name: str
    ready: float
    leased: float


@dataclass(frozen=True)
class CurveRow:
    """A metric's newest value as text, and its curve."""

    name: str
    value: str
    curve: Curve


class ViewState:
    """Keeps the newest value of every metric, any of which may be missing.

    One thread posts while another one reads: containers are replaced, never changed.
    """

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.time) -> None:
        self.steps = config.train.steps
        self.topic_samples = min(config.queue.max_samples, config.max_in_flight)
        """The most samples that a topic can have, to which bars of topics are drawn."""
        self.step = 0
        self.ended = False
        self.metrics: Mapping[str, float] = {}
        self.messages: tuple[str, ...] = ()
        teachers = (on_one_line(f"teacher/{name}") for name in config.teachers)
        self._pools = ("rollout", *teachers, "train")
        self._curve_keys = live_values().keys() | {
            f"{pool}/{of}" for pool in self._pools for of in ("busy", "tokens_per_s")
        }
        self._curves: Mapping[str, Curve] = {}
        self._waits: Mapping[str, str] = {}
        self._clock = clock
        self._started = self._last = clock()
        self._origin: tuple[int, float] | None = None

    def post(self, step: int, metrics: Mapping[str, float]) -> None:
        """Updates the metrics."""
        now = self._clock()
        late = any(key.startswith("eval/") for key in metrics)  # training goes on meanwhile
        if self._origin is None or (step <= self._origin[0] and not late):
            self._origin = (step, now)
        if step > self.step:
            self._last = now
        self.step = max(self.step, step)
        self.metrics = {**self.metrics, **metrics}
        followed = {key: metrics[key] for key in self._curve_keys & metrics.keys()}
        for prefix in ("eval_initial", "eval"):
            followed |= {f"eval/{s}/accuracy": a for s, a in accuracies(metrics, prefix).items()}
        for key, value in followed.items():
            self._curve(key).add(value)

    def rewind(self) -> None:
        """Called when the run goes back to a checkpoint; the curves keep what happened."""
        self.step, self._origin = 0, None

    def began(self, moment: float) -> None:
        """Sets the time, in seconds since the epoch, from which ``elapsed_s`` counts."""
        self._started = moment

    def forget(self) -> None:
        """Called before all of a run's rows come once more: their values are removed."""
        self.rewind()
        self.metrics, self._curves = {}, {}

    def post_waits(self, waits: Mapping[str, str]) -> None:
        """Updates what pools wait for."""
        self._waits = {**self._waits, **waits}

    def post_message(self, text: str) -> None:
        """Appends a message and drops all but the last few, and all that were waited for before."""
        waits = text.startswith(WAITING)
        before = (one for one in self.messages if not (waits and one.startswith(WAITING)))
        self.messages = (*before, text[:MESSAGE_CHARACTERS])[-MESSAGES:]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the state was made, or since the moment that ``began`` got."""
        return self._clock() - self._started

    @property
    def left_s(self) -> float | None:
        """Seconds until the last step at the mean pace so far; None before the second step.

        The pace counts from the first line logged, which excludes the start of the engines.
        """
        if self._origin is None or self.step <= self._origin[0]:
            return None
        origin_step, origin_time = self._origin
        pace = (self._last - origin_time) / (self.step - origin_step)
        return max(self._last + pace * (self.steps - self.step) - self._clock(), 0.0)

    @property
    def times(self) -> str:
        """How long the run has taken, and will take at this pace."""
        left = self.left_s
        remaining = duration(left) if left is not None else "?"
        return f"{duration(self.elapsed_s)} elapsed, {remaining} left"

    @property
    def pools(self) -> list[PoolRow]:
        """Rollout, each teacher, training."""
        metrics = self.metrics
        return [
            PoolRow(
                name=pool,
                tokens_per_s=self._value(f"{pool}/tokens_per_s"),
                busy=self._value(f"{pool}/busy"),
                in_flight=metrics.get(f"{pool}/in_flight"),
                waits_for=self._waits.get(pool, ""),
                busy_curve=self._curves.get(f"{pool}/busy", Curve()),
                tokens_curve=self._curves.get(f"{pool}/tokens_per_s", Curve()),
            )
            for pool in self._pools
        ]

    def _value(self, key: str) -> float | None:
        """The newest value, or the mean over the steps of a run that has ended."""
        mean = self._curves[key].mean if self.ended and key in self._curves else None
        return self.metrics.get(key) if mean is None else mean

    @property
    def topics(self) -> list[TopicRow]:
        """Every topic that reported its depth; those of stale and lost samples if they have any."""
        ready = dict(_between(self.metrics, "queue/", "/ready"))
        leased = dict(_between(self.metrics, "queue/", "/leased"))
        rows = [
            TopicRow(name, ready.get(name, 0.0), leased.get(name, 0.0))
            for name in sorted(ready.keys() | leased.keys())
        ]
        return [row for row in rows if row.name not in (STALE, DEAD) or row.ready + row.leased]

    @property
    def curves(self) -> list[CurveRow]:
        """Those curves of metrics.yaml that have a value, and each source's accuracy."""
        found = [
            CurveRow(one.name, format(self.metrics[key], one.form), self._curves.get(key, Curve()))
            for key, one in live_values().items()
            if key in self.metrics
        ]
        return found + [
            CurveRow(
                f"accuracy {source}",
                f"{value:.1%}",
                self._curves.get(f"eval/{source}/accuracy", Curve()),
            )
            for source, value in self.accuracies.items()
        ]

    @property
    def accuracies(self) -> dict[str, float]:
        """The newest accuracy of each data source."""
        return accuracies(self.metrics, "eval_initial") | accuracies(self.metrics, "eval")

    def _curve(self, key: str) -> Curve:
        """The curve of a metric; one that is not shown beyond ``MAX_CURVES`` accuracies."""
        if key not in self._curves:
            if len(self._curves) >= MAX_CURVES + len(self._curve_keys):
                return Curve()
            self._curves = {**self._curves, key: Curve()}
        return self._curves[key]


def accuracies(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """``<prefix>/<source>/accuracy`` by data source."""
    return dict(_between(metrics, f"{prefix}/", "/accuracy"))


def _between(metrics: Mapping[str, float], prefix: str, suffix: str) -> Iterator[tuple[str, float]]:
    for key, value in metrics.items():
        if key.startswith(prefix) and key.endswith(suffix) and len(key) > len(prefix + suffix):
            yield key[len(prefix) : -len(suffix)], value
