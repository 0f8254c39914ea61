"""The dashboard of a console: the newest values by stage, topic and data source."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from async_opd.config.run_config import RunConfig

MESSAGES = 5
MESSAGE_CHARACTERS = 1000
"""The longest message; run.log has all of it."""


@dataclass(frozen=True)
class StageRow:
    """A stage's newest values; None for a value that it has not reported."""

    name: str
    tokens_per_s: float | None
    busy: float | None
    waits_for: str


@dataclass(frozen=True)
class TopicRow:
    """Samples of a topic: ready, and leased to a consumer."""

    name: str
    ready: float
    leased: float


class Dashboard:
    """Keeps the newest value of every metric, any of which may be missing.

    One thread posts while another one reads: containers are replaced, never changed.
    """

    def __init__(self, config: RunConfig, clock: Callable[[], float] = time.time) -> None:
        self.steps = config.train.steps
        self.step = 0
        self.metrics: Mapping[str, float] = {}
        self.messages: tuple[str, ...] = ()
        self._pools = ("rollout", *(f"teacher/{name}" for name in config.teachers), "train")
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

    def post_waits(self, waits: Mapping[str, str]) -> None:
        """Updates what pools wait for."""
        self._waits = {**self._waits, **waits}

    def post_message(self, text: str) -> None:
        """Appends a message and drops all but the last few."""
        self.messages = (*self.messages, text[:MESSAGE_CHARACTERS])[-MESSAGES:]

    @property
    def elapsed_s(self) -> float:
        """Seconds since the dashboard was made."""
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
    def stages(self) -> list[StageRow]:
        """Rollout, each teacher, training."""
        metrics = self.metrics
        return [
            StageRow(
                name=pool,
                tokens_per_s=metrics.get(f"{pool}/tokens_per_s"),
                busy=metrics.get(f"{pool}/busy"),
                waits_for=self._waits.get(pool, ""),
            )
            for pool in self._pools
        ]

    @property
    def topics(self) -> list[TopicRow]:
        """Every topic that reported its depth."""
        ready = dict(_between(self.metrics, "queue/", "/ready"))
        leased = dict(_between(self.metrics, "queue/", "/leased"))
        names = sorted(ready.keys() | leased.keys())
        return [TopicRow(name, ready.get(name, 0.0), leased.get(name, 0.0)) for name in names]

    @property
    def accuracies(self) -> dict[str, float]:
        """The newest accuracy of each data source."""
        return accuracies(self.metrics, "eval_initial") | accuracies(self.metrics, "eval")


def accuracies(metrics: Mapping[str, float], prefix: str) -> dict[str, float]:
    """``<prefix>/<source>/accuracy`` by data source."""
    return dict(_between(metrics, f"{prefix}/", "/accuracy"))


def _between(metrics: Mapping[str, float], prefix: str, suffix: str) -> Iterator[tuple[str, float]]:
    for key, value in metrics.items():
        if key.startswith(prefix) and key.endswith(suffix) and len(key) > len(prefix + suffix):
            yield key[len(prefix) : -len(suffix)], value
