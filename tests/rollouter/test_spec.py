"""Seeds of rollouts, and arguments of engines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_opd.config.sections.train import LoraConfig
from async_opd.core.stages import SamplingSpec
from rollouter.spec import StudentEngineSpec
from tests.world.config import run_config


def spec(seed: int | None) -> StudentEngineSpec:
    return StudentEngineSpec("student/0", {}, SamplingSpec(8, 1.0, 1.0, 2), (2,), "gloo", seed=seed)


def test_a_rollouts_seed_depends_on_the_runs_seed_and_its_uid_only() -> None:
    assert spec(None).seed_of("p/0") is None
    assert spec(1).seed_of("p/0") == spec(1).seed_of("p/0") == 3727694994002388282
    assert len({spec(1).seed_of("p/0"), spec(2).seed_of("p/0"), spec(1).seed_of("p/1")}) == 3


STUDENT = Path(__file__).parents[2] / "examples" / "quickstart" / "models" / "student"


def made(model: Path = STUDENT, evaluates: bool = False, **sections: Any) -> StudentEngineSpec:
    config = run_config(**{"student": {"model": str(model)}} | sections)
    return StudentEngineSpec.of(config, "cpu", (2,), "student/0", 0, 0, None, evaluates)


@pytest.mark.parametrize("evaluates", [False, True])
def test_only_a_replica_that_generates_rollouts_grades_rewards(evaluates: bool) -> None:
    found = made(evaluates=evaluates, rollout={"n": 2}, reward={"grader": "exact"})
    assert (found.grader is None) == evaluates


def engine_arguments(lora: LoraConfig | None) -> dict[str, object]:
    return made(train={"lora": lora}).kwargs


def test_an_engine_that_applies_adapters_has_room_for_one_and_that_of_merged_weights_none() -> None:
    found = engine_arguments(LoraConfig(rank=5, sync="adapter"))
    assert (found["enable_lora"], found["max_loras"], found["max_lora_rank"]) == (True, 1, 8)
    assert "enable_lora" not in engine_arguments(LoraConfig(rank=5))
    assert engine_arguments(LoraConfig(rank=5)) == engine_arguments(None)


def test_an_engine_wraps_no_layer_but_those_with_an_adapter() -> None:
    """vLLM would wrap the head of a Qwen3, too, and die of prompts scored beside responses."""
    layers = ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert engine_arguments(LoraConfig(sync="adapter"))["lora_target_modules"] == layers
    some = LoraConfig(sync="adapter", targets=["v_proj", "q_proj"])
    assert engine_arguments(some)["lora_target_modules"] == ["q_proj", "v_proj"]


IMAGES = {"train": "none.jsonl", "max_images": 2}


def test_an_engine_of_a_vision_model_takes_the_datas_images(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"vision_config": {}}')
    student = {"model": str(tmp_path), "processor_kwargs": {"max_pixels": 784}}
    found = made(student=student, data=IMAGES).kwargs
    assert found["limit_mm_per_prompt"] == {"image": 2, "video": 0, "audio": 0}
    assert found["mm_processor_kwargs"] == {"max_pixels": 784}
    assert "limit_mm_per_prompt" not in made(data=IMAGES).kwargs
