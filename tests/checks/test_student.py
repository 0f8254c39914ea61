"""Checks of LoRA: what is missing or misspelt is found before the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks import student
from async_opd.config.load import load_config
from async_opd.config.sections.train import ENGINE_RANKS, LoraConfig
from async_opd.core.errors import ConfigError, Findings
from async_opd.models.adapted import linear_layers, trained_entries
from async_opd.models.model_files import ModelFiles
from tests.checks.inputs import MODELS, config, found, model, one

LORA = "train.lora.rank=8"


def test_a_run_with_lora_has_no_problem() -> None:
    assert found(LORA) == []


def test_missing_peft_is_found_with_the_extra_that_brings_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(student, "find_spec", lambda name: None)
    problem = one(LORA)
    assert (problem.key, problem.remedy) == ("train.lora", "pip install 'async-opd[lora]'")


def test_a_target_that_the_student_has_not_is_named_with_those_that_it_has() -> None:
    problem = one("train.lora.targets=[q_proj,c_attn]")
    assert problem.key == "train.lora.targets"
    assert "no linear layer c_attn" in problem.message
    assert "down_proj, gate_proj, k_proj" in problem.remedy


def test_dropout_is_refused_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="the engines sample without dropout"):
        config("train.lora.dropout=0.1")


@pytest.mark.parametrize(("rank", "expected"), [(1, 1), (5, 8), (16, 16), (400, 512), (513, None)])
def test_an_engine_holds_ranks_up_to_the_next_one_of_its_list(
    rank: int, expected: int | None
) -> None:
    assert LoraConfig(rank=rank).engine_rank == expected


@pytest.mark.slow
def test_the_list_of_ranks_is_vllms() -> None:
    config_lora = pytest.importorskip("vllm.config.lora")
    assert config_lora.MaxLoRARanks.__args__ == ENGINE_RANKS


@pytest.mark.parametrize(("rslora", "scale"), [(False, 2.0), (True, 8.0)])
def test_the_scale_of_adapters(rslora: bool, scale: float) -> None:
    assert LoraConfig(rank=16, alpha=32, use_rslora=rslora).scale == scale


@pytest.mark.parametrize("made", ["tiny_model", "mixture", "corrected_mixture"])
def test_the_planner_counts_the_entries_that_are_trained(made: str, tmp_path: Path) -> None:
    from tests.trainer import models, test_named_weights
    from trainer.student.adapters import add_adapters

    model: Any = getattr(models, made, None) or getattr(test_named_weights, made)
    model = model()
    model.save_pretrained(tmp_path)
    lora = LoraConfig(rank=3)
    expected = trained_entries(tmp_path, lora)
    add_adapters(model, lora)
    assert expected == sum(p.numel() for p in model.parameters() if p.requires_grad)


def test_a_rank_that_no_engine_takes_is_refused_for_adapters_only() -> None:
    problems = found("train.lora.rank=600", "train.lora.sync=adapter")
    assert [problem.key for problem in problems] == ["train.lora.rank"]
    assert "up to rank 512" in problems[0].message
    assert found("train.lora.rank=600") == []


def test_weights_that_cannot_be_read_are_a_problem(tmp_path: Path) -> None:
    student = model(tmp_path, "student")
    (student / "model.safetensors").write_bytes(b"torn")
    problems = found(LORA, f"student.model={student}")
    assert any("cannot be read" in problem.message for problem in problems)
    assert {problem.key for problem in problems} == {"student.model"}


def test_adapters_of_a_mixture_are_merged(tmp_path: Path) -> None:
    from tests.trainer.test_named_weights import mixture

    mixture().save_pretrained(tmp_path)
    shutil.copy(MODELS / "student" / "tokenizer.json", tmp_path)
    problems, lora = Findings("c.yaml"), config(LORA, "train.lora.sync=adapter")
    files = ModelFiles.read(str(tmp_path), weights=True)
    student.check_adapters(lora, files, problems)
    assert [problem.key for problem in problems.problems] == ["train.lora.sync"]


def test_engines_that_apply_adapters_need_a_local_student_or_names_of_layers() -> None:
    def keys(*overrides: str) -> list[str]:
        problems = Findings("c.yaml")
        student.check_adapters(config(LORA, *overrides), None, problems)
        return [problem.key for problem in problems.problems]

    assert keys("train.lora.sync=adapter") == ["train.lora.sync"]
    assert keys("train.lora.sync=adapter", "train.lora.targets=[q_proj]") == []
    assert keys() == []


def test_some_targets_have_fewer_entries() -> None:
    student = MODELS / "student"
    layers = linear_layers(student)
    wanted = [shape for name, shape in layers.items() if name.endswith("q_proj")]
    lora = LoraConfig(rank=2, targets=["q_proj"])
    assert trained_entries(student, lora) == 2 * sum(map(sum, wanted)) > 0


def test_the_example_is_the_quickstart_with_lora() -> None:
    examples = Path(__file__).parents[2] / "examples"
    lora, full = (load_config(examples / f"{name}.yaml", []) for name in ("lora", "quickstart"))
    own = {"name", "train", "plan"}
    assert lora.model_dump(exclude=own) == full.model_dump(exclude=own)
    assert lora.train.lora is not None
