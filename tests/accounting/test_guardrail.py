"""What the guardrail tells, and when."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.accounting.guardrail import Guardrail
from async_opd.config.sections.reliability import GuardrailConfig


def guardrail(**limits: Any) -> Guardrail:
    return Guardrail(GuardrailConfig(**({"window": 1} | limits)))


def step(length: float = 10.0, truncated: float = 0.0, repetition: float = 0.0) -> dict[str, float]:
    return {
        "train/mean_response_tokens": length,
        "train/truncated_share": truncated,
        "train/repetition": repetition,
    }


def test_ordinary_responses_are_not_mentioned() -> None:
    guard = guardrail()
    assert [guard.observe(step()) for _ in range(5)] == [[]] * 5


def test_truncated_responses_are_told_with_their_share_and_the_limit() -> None:
    (told,) = guardrail(max_truncated_share=0.5).observe(step(truncated=0.75))
    assert told == "75% of the responses are cut off at rollout.max_tokens (guardrail: 0.5)"


def test_a_limit_that_stays_passed_is_told_once() -> None:
    guard = guardrail()
    assert len([t for _ in range(4) for t in guard.observe(step(truncated=0.9))]) == 1


@pytest.mark.parametrize("mode", ["stop", "roll_back"])
def test_a_resumed_run_that_exceeded_a_limit_before_is_stopped_again(mode: str) -> None:
    before = guardrail()
    before.observe(step(truncated=0.9))
    resumed = Guardrail(GuardrailConfig(mode=mode, window=1), before.state)  # type: ignore[arg-type]
    assert len(resumed.observe(step(truncated=0.9))) == 1


def test_a_limit_that_is_passed_again_is_told_again() -> None:
    guard = guardrail()
    told = [len(guard.observe(step(truncated=share))) for share in (0.9, 0.1, 0.9)]
    assert told == [1, 0, 1]


def test_drift_is_measured_against_the_first_steps() -> None:
    guard = guardrail(max_length_drift=2.0)
    told = [len(guard.observe(step(length=length))) for length in (10, 10, 19, 21)]
    assert told == [0, 0, 0, 1]


def test_repetition_is_told() -> None:
    assert "repeat" in guardrail().observe(step(repetition=0.8))[0]


def test_a_single_bad_batch_does_not_pass_a_smoothed_limit() -> None:
    guard = guardrail(window=10)
    guard.observe(step())
    assert guard.observe(step(truncated=1.0)) == []


def test_off_watches_nothing() -> None:
    assert guardrail(mode="off").observe(step(truncated=1.0)) == []
