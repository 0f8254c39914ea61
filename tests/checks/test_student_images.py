"""Settings of ``train`` that do not go with a VLM student, or that need one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.checks.student import check_vlm_student
from async_opd.config.sections.log import LogConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import Findings


def keys(vision: bool, replay: bool = False, **train: Any) -> list[str]:
    log = LogConfig(replay=replay)
    config: Any = SimpleNamespace(train=TrainConfig(**train), log=log)
    settings = {"vision_config": {}} if vision else {}
    student: Any = SimpleNamespace(path="m", config=settings)
    found = Findings("run.yaml")
    check_vlm_student(config, student, found)
    return [problem.key for problem in found.problems]


@pytest.mark.parametrize(
    ("train", "key"),
    [
        ({"context_parallel": 2, "ranks": 2}, "train.context_parallel"),
        ({"compile": True}, "train.compile"),
        ({"lora": {"sync": "adapter"}}, "train.lora.sync"),
        ({"routing": "replay"}, "train.routing"),
    ],
)
def test_what_no_step_of_a_vlm_student_computes_is_refused(train: dict[str, Any], key: str) -> None:
    assert keys(True, **train) == [key]
    assert keys(False, **train) == []


def test_a_student_that_reads_text_only_has_nothing_to_freeze() -> None:
    assert keys(False, freeze=["vision_tower"]) == ["train.freeze"]
    assert keys(True, freeze=["vision_tower", "projector"]) == []


def test_steps_of_a_vlm_student_are_not_kept_for_replay() -> None:
    assert keys(True, replay=True) == ["log.replay"]
    assert keys(False, replay=True) == []
