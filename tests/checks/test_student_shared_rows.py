"""Checks of rows that ranks share: students that the trainer would refuse are refused before."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.student import check_shared_rows
from async_opd.core.errors import Findings
from async_opd.models.model_files import ModelFiles
from tests.checks.inputs import config, found, model

SHARED = ("train.ranks=2", "train.context_parallel=2")


def messages(tmp_path: Path, *overrides: str, **settings: Any) -> list[str]:
    files = ModelFiles.read(str(model(tmp_path, "student", **settings)), weights=True)
    problems = Findings("c.yaml")
    check_shared_rows(config(*overrides), files, problems)
    return [f"{problem.key}: {problem.message}" for problem in problems.problems]


def test_attention_with_windows_is_shared(tmp_path: Path) -> None:
    kinds = ["sliding_attention", "full_attention"]
    assert messages(tmp_path, *SHARED, layer_types=kinds) == []


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"model_type": "bloom"}, "ALiBi"),
        ({"alibi": True}, "ALiBi"),
        ({"model_type": "mamba"}, "recurrent state"),
        ({"model_type": "gpt_oss"}, "sinks"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "kind linear_attention"),
        ({"text_config": {"model_type": "lfm2"}}, "convolutions"),
    ],
)
def test_what_passes_on_tokens_without_attention_is_refused(
    tmp_path: Path, settings: dict[str, Any], reason: str
) -> None:
    (message,) = messages(tmp_path, *SHARED, **settings)
    assert message.startswith("train.context_parallel: ranks cannot share")
    assert reason in message
    assert messages(tmp_path / "alone", **settings) == []


def test_flex_is_refused(tmp_path: Path) -> None:
    (message,) = messages(tmp_path, *SHARED, "train.attention=flex")
    assert message.startswith("train.attention: flex")


def test_check_refuses_such_a_student(tmp_path: Path) -> None:
    student = model(tmp_path, "student", layer_types=["conv", 1])
    problems = found(*SHARED, f"student.model={student}")
    assert "layers of kind 1, conv" in " ".join(problem.message for problem in problems)
