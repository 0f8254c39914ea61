"""Watches responses for the ways on-policy distillation runs away (arXiv:2604.08527).

    truncated    share of responses cut off at ``rollout.max_tokens``
    drift        mean response length over that of the first ``window`` steps
    repetition   share of a response's 8-grams that occurred in it before
    mismatch     the mean factor between probabilities of engines and trainer under the same weights
    ess          share of responses that this difference leaves effective, at least its limit

A student whose responses grow until they are cut off, or repeat themselves, is trained on these
responses; the loss need not show it. Each value is an exponential mean over ``window`` steps, those
of the mismatch over steps that measure it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from async_opd.core.errors import GuardrailExceeded

if TYPE_CHECKING:
    from async_opd.config.sections.reliability import GuardrailConfig

MISMATCH = {"mismatch": "mismatch/error", "ess": "mismatch/ess"}
"""Values of precision, and the metrics of those steps that have them."""
GRAM = 8
"""Tokens of the pieces that ``train/repetition`` looks for twice in a response."""


@dataclass(frozen=True)
class GuardrailState:
    """Smoothed values, mean lengths of the first steps, and the limits exceeded at the last one."""

    means: dict[str, float] = field(default_factory=dict)
    lengths: tuple[float, ...] = ()
    exceeded: tuple[str, ...] = ()


@dataclass
class Guardrail:
    """Compares each step's metrics with the limits; reports a limit when it becomes exceeded."""

    config: GuardrailConfig
    state: GuardrailState = GuardrailState()
    """The state after the last step; a checkpoint has it."""
    quantized: bool = False
    """Whether the student's engines have a lower precision than the trainer: ``min_ess`` is for
    them alone, since a long response lowers the value at any precision."""

    def observe(self, metrics: Mapping[str, float]) -> list[str]:
        """Sentences about the limits that this step exceeds and the step before did not.

        If they end the run, or take it back, about all that it exceeds: a resumed run may have
        exceeded them before.
        """
        if self.config.mode == "off" or "train/mean_response_tokens" not in metrics:
            return []
        values = {
            "truncated": metrics["train/truncated_share"],
            "repetition": metrics["train/repetition"],
            "drift": self._drift(metrics["train/mean_response_tokens"]),
            **{key: metrics[name] for key, name in MISMATCH.items() if name in metrics},
        }
        share = 2 / (self.config.window + 1)
        before = self.state
        means = before.means | {
            key: value * share + before.means.get(key, value) * (1 - share)
            for key, value in values.items()
        }
        exceeded = sorted(key for key in means if self._exceeds(key, means[key]))
        self.state = replace(before, means=means, exceeded=tuple(exceeded))
        known = before.exceeded if self.config.mode == "warn" else ()
        return [self._sentence(key) for key in exceeded if key in values and key not in known]

    def enforce(self, step: int, findings: Sequence[str]) -> None:
        """GuardrailExceeded if a step has findings and the run may not go on with them."""
        if findings and self.config.mode in ("stop", "roll_back"):
            remedies = [
                text
                for text, known in _REMEDIES.items()
                if not known.isdisjoint(self.state.exceeded)
            ]
            remedy = ", ".join([*remedies, "or set guardrail.mode to warn"])
            raise GuardrailExceeded(step, "; ".join(findings), remedy)

    @property
    def metrics(self) -> dict[str, float]:
        """The smoothed values."""
        return {f"guardrail/{key}": value for key, value in self.state.means.items()}

    @property
    def _limits(self) -> dict[str, float]:
        config = self.config
        return {
            "truncated": config.max_truncated_share,
            "repetition": config.max_repetition,
            "drift": config.max_length_drift,
            "mismatch": config.max_mismatch,
            "ess": config.min_ess if self.quantized else 0.0,
        }

    def _exceeds(self, key: str, mean: float) -> bool:
        limit = self._limits[key]
        return mean < limit if key == "ess" else mean > limit

    def _drift(self, length: float) -> float:
        lengths = self.state.lengths
        if len(lengths) < self.config.window:
            self.state = replace(self.state, lengths=(*lengths, length))
            return 1.0
        return length / max(sum(lengths) / len(lengths), 1.0)

    def _sentence(self, key: str) -> str:
        value = self.state.means[key]
        finding = {
            "truncated": f"{value:.0%} of the responses are cut off at rollout.max_tokens, or at "
            "the bounds of an episode",
            "repetition": f"{value:.0%} of the responses' {GRAM}-grams repeat earlier ones",
            "drift": f"responses are {value:.1f} times as long as at the start",
            "mismatch": "engines and trainer give tokens probabilities that differ by a factor of "
            f"{value:.3g} under the same weights",
            "ess": f"rounding in the engines leaves {value:.0%} of the responses effective",
        }[key]
        return f"{finding} (guardrail: {self._limits[key]:g})"


_REMEDIES = {
    "lower train.lr or the share of prompts without an end, raise rollout.max_tokens": {
        *("truncated", "drift", "repetition")
    },
    "take a finer rollout.engine.quantization or none, weigh tokens by loss.importance": {
        *MISMATCH
    },
}
"""By what to change, the values that it is for."""
