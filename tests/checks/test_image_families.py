"""Models that get images have to see, and to be of a family whose images are computed alike."""

from __future__ import annotations

import importlib.util
from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from async_opd.checks.image_families import check_families
from async_opd.core.errors import Findings, Problem
from async_opd.models.engine_args import Device
from async_opd.models.families import NOT_ON_CPU
from async_opd.models.model_files import ModelFiles
from tests.checks.inputs import change, found, pictured_row, rows
from tests.world.config import run_config

STUDENT, TEACHER = "student.model", "teachers.see.model"
SEES = {"model_type": "qwen3_vl", "vision_config": {"model_type": "qwen3_vl_vision"}}
TEXT = {"model_type": "qwen3"}


def files(folder: Path, settings: dict[str, Any]) -> ModelFiles:
    """A model's files with a processor's settings."""
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    change(folder / "config.json", settings)
    (folder / "preprocessor_config.json").write_text("{}")
    return ModelFiles(folder, settings, {}, 8, (2,))


def problems(
    tmp_path: Path,
    student: dict[str, Any],
    teacher: dict[str, Any] | None = None,
    sources: Set[str] = frozenset({"pictures"}),
    device: Device = "cpu",
    **kwargs: Any,
) -> list[Problem]:
    """What is found of a run whose rows of ``sources`` have images; ``kwargs``: of the student."""
    teachers = {
        "see": {"model": "v", "sources": ["pictures"]},
        "read": {"model": "t", "sources": ["texts"]},
    }
    config = run_config(student={"model": "s", **kwargs}, teachers=teachers)
    models = {
        STUDENT: files(tmp_path / "s", student),
        TEACHER: files(tmp_path / "v", teacher or SEES),
        "teachers.read.model": files(tmp_path / "t", TEXT),
    }
    collected = Findings("c.yaml")
    check_families(config, device, models, frozenset(), sources, collected)
    return collected.problems


@pytest.fixture(autouse=True)
def trainable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the trainer takes them is not asked here."""
    monkeypatch.setattr(ModelFiles, "untrainable", "")


def test_a_teacher_of_text_may_stand_beside_a_student_that_sees(tmp_path: Path) -> None:
    assert problems(tmp_path, SEES) == []


def test_every_model_of_text_that_gets_images_is_named(tmp_path: Path) -> None:
    student, teacher = problems(tmp_path, TEXT, TEXT)
    assert (student.key, teacher.key) == (STUDENT, TEACHER)
    assert "rows of pictures have images" in teacher.message
    assert "no vision_config" in teacher.message


def test_a_teacher_of_text_that_gets_one_source_with_images_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, SEES, sources={"pictures", "texts"})
    assert problem.key == "teachers.read.model"
    assert "rows of texts have images" in problem.message


@pytest.mark.parametrize("kind", ["qwen2_vl", "mllama", "internvl"])
def test_a_family_that_was_not_compared_is_refused_with_those_that_were(
    tmp_path: Path, kind: str
) -> None:
    student, teacher = problems(tmp_path, SEES | {"model_type": kind}, {**SEES, "model_type": kind})
    assert f"is a {kind}: vLLM and transformers were not compared" in student.message
    assert student.remedy == teacher.remedy == "possible: llava, qwen2_5_vl, qwen3_vl"


GEMMA = SEES | {"model_type": "gemma3"}
PIXTRAL = {"model_type": "llava", "vision_config": {"model_type": "pixtral"}}


@pytest.mark.parametrize(
    ("models", "given", "key", "words"),
    [
        pytest.param((SEES, GEMMA), {}, TEACHER, NOT_ON_CPU["gemma3"], id="Gemma 3 on a CPU"),
        pytest.param(
            (GEMMA, GEMMA),
            {"device": "cuda"},
            STUDENT,
            "the trainer's rows are causal",
            id="Gemma 3 on a GPU, which teaches",
        ),
        pytest.param(
            (SEES, PIXTRAL),
            {},
            TEACHER,
            "is a llava with a pixtral: only one with a clip_vision_model",
            id="a llava with another tower",
        ),
        pytest.param(
            (SEES | {"model_type": "mllama"}, TEXT),
            {"sources": set()},
            STUDENT,
            "were not compared",
            id="a student that sees, without images",
        ),
        pytest.param(
            (TEXT, TEXT),
            {"sources": set(), "processor_kwargs": {"max_pixels": 1}},
            "student.processor_kwargs",
            "max_pixels",
            id="settings of a processor that nothing reads",
        ),
    ],
)
def test_a_model_whose_images_are_not_computed_alike_is_refused(
    models: tuple[dict[str, Any], dict[str, Any]],
    given: dict[str, Any],
    key: str,
    words: str,
    tmp_path: Path,
) -> None:
    (problem,) = problems(tmp_path, *models, **given)
    assert (problem.key, words in problem.message) == (key, True)


def test_a_model_that_sees_needs_its_processors_settings(tmp_path: Path) -> None:
    student, collected = files(tmp_path / "s", SEES), Findings("c.yaml")
    (student.path / "preprocessor_config.json").unlink()
    given = (run_config(), "cpu", {STUDENT: student})
    check_families(*given, {STUDENT}, set(), collected)
    assert collected.problems == []
    check_families(*given, set(), set(), collected)
    assert "none of preprocessor_config.json, proc" in collected.problems[0].message


def test_a_llava_whose_tower_vllm_does_not_load_is_refused(tmp_path: Path) -> None:
    llava = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}}
    weights = {"vision_tower.embeddings.class_embedding": np.zeros(2, np.float32)}
    assert problems(tmp_path, SEES, llava) == []
    save_file(weights, tmp_path / "v" / "model.safetensors")
    config = run_config(teachers={"see": {"model": "v"}})
    collected, read = Findings("c.yaml"), ModelFiles(tmp_path / "v", llava, {}, 8, (2,))
    check_families(config, "cpu", {TEACHER: read}, set(), {"x"}, collected)
    (problem,) = collected.problems
    assert "vision_tower.embeddings.class_embedding, which vLLM does not load" in problem.message


def test_models_that_see_need_the_extra_vision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "torchvision" else real(name)
    )
    (problem,) = problems(tmp_path, SEES)
    assert "need torchvision, which this Python lacks" in problem.message
    assert (problem.key, problem.remedy) == (STUDENT, "pip install 'async-opd[vision]'")


def test_models_of_text_need_no_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert problems(tmp_path, TEXT, TEXT, sources=set()) == []


def test_a_runs_rows_say_which_models_get_images(tmp_path: Path) -> None:
    said = {problem.key: problem.message for problem in found(rows(tmp_path, pictured_row()))}
    assert "rows of sort have images" in said["student.model"]
    assert "rows of sort have images" in said["teachers.sort.model"]
    assert "teachers.reverse.model" not in said


@pytest.mark.parametrize(("api", "refused"), [("sglang", True), ("vllm", False)])
def test_images_go_to_servers_of_vllm_only(tmp_path: Path, api: str, refused: bool) -> None:
    see = {"kind": "endpoint", "urls": ["http://h:1"], "served_model": "v", "api": api}
    config = run_config(teachers={"see": {**see, "sources": ["pictures"]}})
    collected = Findings("c.yaml")
    models = {STUDENT: files(tmp_path / "s", SEES)}
    check_families(config, "cpu", models, frozenset(), {"pictures"}, collected)
    assert [one.key for one in collected.problems] == ["teachers.see.api"] * refused
