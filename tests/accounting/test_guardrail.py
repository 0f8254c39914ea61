"""The lines of the guardrail, and when they come."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.accounting.guardrail import GRAM, Guardrail
from async_opd.config.sections.reliability import GuardrailConfig


def guardrail(**limits: Any) -> Guardrail:
    return Guardrail(GuardrailConfig(**({"window": 1} | limits)))


def step(length: float = 10.0, truncated: float = 0.0, repetition: float = 0.0) -> dict[str, float]:
    return {
        "train/mean_response_tokens": length,
        "train/truncated_share": truncated,
        "train/repetition": repetition,
    }


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ({"truncated": 0.75}, "75% of the responses are cut off at rollout.max_tokens"),
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
