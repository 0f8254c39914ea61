"""Watches responses for the ways on-policy distillation runs away (arXiv:2604.08527).

    truncated    share of responses cut off at ``rollout.max_tokens``
    drift        mean response length over that of the first ``baseline_steps`` steps
    repetition   share of a response's 8-grams that occurred in it before

A student that inflates its answers until they are cut off, or repeats itself, is trained on its own
ruins; the loss need not show it. Each value is an exponential mean over ``window`` steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_opd.config.run_config import GuardrailConfig

GRAM = 8


@dataclass(frozen=True)
class GuardrailState:
    """The smoothed values, the lengths of the first steps, the limits that are passed."""

    means: dict[str, float] = field(default_factory=dict)
    lengths: tuple[float, ...] = ()
    told: tuple[str, ...] = ()


@dataclass
class Guardrail:
    """Judges each step's metrics; a limit that is passed is told once, until it is kept again."""

    config: GuardrailConfig
    _means: dict[str, float] = field(default_factory=dict)
    _lengths: list[float] = field(default_factory=list)
    _told: set[str] = field(default_factory=set)

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """The limits that this step passes for the first time, each as a sentence."""
        if self.config.mode == "off" or "train/mean_response_tokens" not in metrics:
            return []
        found = {
            "truncated": metrics["train/truncated_share"],
            "repetition": metrics["train/repetition"],
            "drift": self._drift(metrics["train/mean_response_tokens"]),
        }
        share = 2 / (self.config.window + 1)
        for key, value in found.items():
            self._means[key] = value * share + self._means.get(key, value) * (1 - share)
        passed = {key for key, limit in self._limits.items() if self._means[key] > limit}
        new, self._told = sorted(passed - self._told), passed
        return [self._sentence(key) for key in new]

    def state(self) -> GuardrailState:
        """What was seen so far, for a checkpoint."""
        return GuardrailState(dict(self._means), tuple(self._lengths), tuple(sorted(self._told)))

    def restore(self, state: GuardrailState) -> None:
        """Goes on from a checkpoint."""
        self._means, self._lengths = dict(state.means), list(state.lengths)
        self._told = set(state.told)

    @property
    def metrics(self) -> dict[str, float]:
        """The smoothed values."""
        return {f"guardrail/{key}": value for key, value in self._means.items()}

    @property
    def _limits(self) -> dict[str, float]:
        config = self.config
        return {
            "truncated": config.max_truncated_share,
            "repetition": config.max_repetition,
            "drift": config.max_length_drift,
        }

    def _drift(self, length: float) -> float:
        if len(self._lengths) < self.config.baseline_steps:
            self._lengths.append(length)
            return 1.0
        return length / max(sum(self._lengths) / len(self._lengths), 1.0)

    def _sentence(self, key: str) -> str:
        value, limit = self._means[key], self._limits[key]
        said = {
            "truncated": f"{value:.0%} of the responses are cut off at rollout.max_tokens",
            "repetition": f"{value:.0%} of the responses' {GRAM}-grams repeat earlier ones",
            "drift": f"responses are {value:.1f} times as long as at the start",
        }[key]
        return f"{said} (guardrail: {limit:g})"
