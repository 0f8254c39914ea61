"""Which source each prompt is from: by weight, by the sources' sizes, and by step.

All of it follows from the number of prompts taken before, so that a cursor restores it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.data import beginnings
from async_opd.core.errors import ConfigError
from async_opd.data.streamed_rows import StreamedRows

MAX_STEPS = (1 << 31) - 1
"""As ``train.steps``."""
Phase = tuple[int, Sequence[float]]
"""From how many prompts on a mixture holds, and its weights; a source of weight 0 is not taken."""


class Mixture:
    """Takes prompts from sources in turn: in each phase all are within one prompt of their share.

    ``taken`` counts each source's prompts, ``cursor`` all of them.
    """

    def __init__(self, phases: Sequence[Phase]) -> None:
        """``phases`` by their beginnings, of which the first is 0."""
        self._next = list(phases)
        self._weights: Sequence[float] = self._next[0][1]
        self.taken = [0] * len(self._weights)
        self.cursor = self._begun = 0
        self._before = list(self.taken)

    def advance(self) -> tuple[int, int]:
        """The next prompt's source, and the number of prompts taken from it before."""
        while self._next and self._next[0][0] <= self.cursor:
            self._begun, self._weights = self._next.pop(0)
            self._before = list(self.taken)
        # Of the sources that are behind their share, the one whose next prompt is due first is
        # taken: each source is within one prompt of its share at all times.
        step, total = self.cursor + 1 - self._begun, float(sum(self._weights))
        own = [taken - before for taken, before in zip(self.taken, self._before, strict=True)]
        sources = [i for i, weight in enumerate(self._weights) if weight]
        behind = [i for i in sources if own[i] * total < self._weights[i] * step]
        source = min(behind or sources, key=lambda i: ((own[i] + 1) / self._weights[i], i))
        taken = self.taken[source]
        self.taken[source] += 1
        self.cursor += 1
        return source, taken

    def back(self, source: int) -> None:
        """Undoes the last ``advance``, which gave this source."""
        self.taken[source] -= 1
        self.cursor -= 1


def phases_of(config: RunConfig, rows: Sequence[Sequence[object] | StreamedRows]) -> list[Phase]:
    """The mixtures of ``data.train``, whose sources have these rows.

    Step k has the prompts (k - 1) · B / n to k · B / n of the stream, with B samples a batch and n
    rollouts of a prompt. Weights are multiplied by sizes^(1 / ``data.size_temperature``).
    """
    sources, temperature = config.data.train, config.data.size_temperature
    weights = [
        source.weight * (1.0 if temperature is None else _size(own) ** (1 / temperature))
        for source, own in zip(sources, rows, strict=True)
    ]
    per_step = config.train.batch_size // config.rollout.n
    phases: list[Phase] = []
    for step in beginnings(sources):
        active = [w * s.is_active(step) for s, w in zip(sources, weights, strict=True)]
        if any(active):
            phases.append(((step - 1) * per_step, active))
    return phases


def passes(config: RunConfig, rows: Sequence[Sequence[object] | StreamedRows]) -> list[float]:
    """How often the steps of ``train.epochs`` take each source's rows: ``epochs`` on average.

    The steps are those of all rows together, of which each source has the share of its weight.
    """
    _, weights = phases_of(config, rows)[0]
    sizes, epochs = list(map(_size, rows)), config.train.epochs or 0.0
    return [
        epochs * sum(sizes) * weight / sum(weights) / size
        for weight, size in zip(weights, sizes, strict=True)
    ]


def _size(rows: Sequence[object] | StreamedRows) -> int:
    """The number of rows; preflight refuses temperatures with sources of unknown size."""
    return 1 if isinstance(rows, StreamedRows) else max(len(rows), 1)


def with_steps(config: RunConfig, rows: Sequence[Sequence[object] | StreamedRows]) -> RunConfig:
    """The config with the steps of its ``train.epochs``: the batches that these rows fill.

    Unchanged while a source has no rows here, whose number a run will know. ConfigError for more
    than ``MAX_STEPS``.
    """
    if config.train.epochs is None or not all(rows):
        return config
    samples = config.train.epochs * sum(map(_size, rows)) * config.rollout.n
    steps = max(1, math.ceil(round(samples / config.train.batch_size, 9)))
    if steps > MAX_STEPS:
        message = f"found {config.train.epochs:g}, which is {steps} steps"
        raise ConfigError.of("train.epochs", message, "take fewer", "the config")
    train = config.train.model_copy(update={"steps": steps, "epochs": None})
    return config.model_copy(update={"train": train})
