"""The lines of the guardrail, and when they come."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.accounting.guardrail import GRAM, Guardrail
from async_opd.config.sections.reliability import GuardrailConfig
from async_opd.core.errors import GuardrailExceeded


def guardrail(**limits: Any) -> Guardrail:
    return Guardrail(GuardrailConfig(**({"window": 1} | limits)), quantized=True)


def step(length: float = 10.0, truncated: float = 0.0, repetition: float = 0.0) -> dict[str, float]:
    return {
        "train/mean_response_tokens": length,
        "train/truncated_share": truncated,
        "train/repetition": repetition,
    }


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        (
            {"truncated": 0.75},
            "75% of the responses are cut off at rollout.max_tokens, or at the bounds of an "
            "episode",
        ),
        ({"repetition": 0.75}, f"75% of the responses' {GRAM}-grams repeat earlier ones"),
    ],
)
def test_the_line_has_the_share_and_the_limit(bad: dict[str, float], line: str) -> None:
    limits = {"max_truncated_share": 0.5, "max_repetition": 0.5}
    assert guardrail(**limits).observe(step(**bad)) == [f"{line} (guardrail: 0.5)"]


@pytest.mark.parametrize(
    ("limits", "steps", "lines"),
    [
        ({}, [{}] * 5, [0] * 5),
        ({}, [{"truncated": 0.9}] * 4, [1, 0, 0, 0]),
        ({}, [{"truncated": share} for share in (0.9, 0.1, 0.9)], [1, 0, 1]),
        (
            {"max_length_drift": 2.0},
            [{"length": length} for length in (10, 10, 19, 21)],
            [0, 0, 0, 1],
        ),
        ({}, [{"repetition": 0.8}], [1]),
        ({"window": 10}, [{}, {"truncated": 1.0}], [0, 0]),
        ({"mode": "off"}, [{"truncated": 1.0}], [0]),
    ],
    ids=["ordinary", "once", "again", "drift", "repetition", "one bad batch", "off"],
)
def test_a_limit_has_a_line_when_it_is_passed(
    limits: dict[str, Any], steps: list[dict[str, float]], lines: list[int]
) -> None:
    guard = guardrail(**limits)
    assert [len(guard.observe(step(**one))) for one in steps] == lines


@pytest.mark.parametrize("mode", ["stop", "roll_back"])
def test_a_resumed_run_that_exceeded_a_limit_before_is_stopped_again(mode: str) -> None:
    before = guardrail()
    before.observe(step(truncated=0.9))
    resumed = Guardrail(GuardrailConfig(mode=mode, window=1), before.state)  # type: ignore[arg-type]
    assert len(resumed.observe(step(truncated=0.9))) == 1


def measured(error: float | None = None, ess: float | None = None) -> dict[str, float]:
    """A step of good responses, with the metrics of its mismatch that it has."""
    found = {"mismatch/error": error, "mismatch/ess": ess}
    return step() | {key: value for key, value in found.items() if value is not None}


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        (
            {"error": 1.062},
            "engines and trainer give tokens probabilities that differ by a factor of 1.06 under "
            "the same weights (guardrail: 1.05)",
        ),
        (
            {"ess": 0.31},
            "rounding in the engines leaves 31% of the responses effective (guardrail: 0.5)",
        ),
    ],
)
def test_a_mismatch_beyond_its_limit_has_a_line(bad: dict[str, float], line: str) -> None:
    guard = guardrail()
    assert guard.observe(measured(error=1.05, ess=0.5)) == []
    assert guard.observe(measured(**bad)) == [line]


def test_a_limit_of_0_switches_the_effective_responses_off() -> None:
    assert guardrail(min_ess=0).observe(measured(ess=0.01)) == []


def test_engines_of_the_trainers_precision_have_no_limit_of_effective_responses() -> None:
    """Long responses lower their number at any precision."""
    guard = Guardrail(GuardrailConfig(window=1))
    assert guard.observe(measured(ess=0.01)) == []


def test_a_limit_is_not_exceeded_by_a_step_that_does_not_measure_it() -> None:
    guard = guardrail(mode="stop")
    assert guard.observe(measured(error=1.2))
    assert guard.observe(step()) == []


def test_a_run_that_measures_no_mismatch_has_no_mean_of_it() -> None:
    guard = guardrail()
    guard.observe(step())
    assert guard.metrics.keys() == {
        f"guardrail/{key}" for key in ("truncated", "repetition", "drift")
    }


def test_the_mean_of_a_mismatch_is_over_the_steps_that_measure_it() -> None:
    guard = guardrail(window=3)
    for error in (1.0, None, None, 1.2):
        guard.observe(measured(error=error))
    assert guard.metrics["guardrail/mismatch"] == pytest.approx((1.0 + 1.2) / 2)


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        (measured(error=1.2), "take a finer rollout.engine.quantization or none"),
        (step(truncated=0.9), "lower train.lr or the share of prompts without an end"),
    ],
)
def test_the_remedy_is_for_the_limit_that_is_exceeded(bad: dict[str, float], words: str) -> None:
    guard = guardrail(mode="stop")
    with pytest.raises(GuardrailExceeded) as raised:
        guard.enforce(7, guard.observe(bad))
    assert raised.value.remedy.startswith(words)
    assert raised.value.remedy.count("train.lr") + raised.value.remedy.count("finer") == 1


@pytest.mark.parametrize(
    ("mode", "findings"), [("stop", []), ("roll_back", []), ("warn", ["long"])]
)
def test_a_run_goes_on_without_findings_and_with_those_that_are_only_reported(
    mode: str, findings: list[str]
) -> None:
    guardrail(mode=mode).enforce(7, findings)
