"""The config by which a model is evaluated: its directory, its engines, and its trust."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from async_opd.checks.resources import pools
from async_opd.config.load import load_config
from async_opd.core.errors import ConfigError
from async_opd.files.run_format import write_run_format
from async_opd.tools.evaluated_model import evaluation_config

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"


def test_only_engines_that_evaluate_are_a_pool_of_their_own() -> None:
    config = load_config(EXAMPLE, ["rollout.replicas=3"])
    taken = {pool.name: pool.replicas for pool in pools(evaluation_config(config, None, None))}
    assert taken["eval"] == 3


def test_a_run_directory_stands_for_its_final_model(tmp_path: Path) -> None:
    write_run_format(tmp_path)
    config = load_config(EXAMPLE, [])
    with pytest.raises(ConfigError, match="has no model/ yet"):
        evaluation_config(config, str(tmp_path), None)
    (tmp_path / "model").mkdir()
    assert evaluation_config(config, str(tmp_path), None).student.model == str(tmp_path / "model")


def test_a_relative_directory_is_not_taken_for_a_hub_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(EXAMPLE.parent / "quickstart" / "models" / "student", tmp_path / "models/mine")
    monkeypatch.chdir(tmp_path)
    alone = evaluation_config(load_config(EXAMPLE), "models/mine", None)
    assert alone.student.model == str(tmp_path / "models" / "mine")


def test_a_teacher_may_be_named_by_its_hub_id() -> None:
    config = load_config(EXAMPLE, ["teachers.sort.model=somebody/sorter"])
    assert evaluation_config(config, None, "sort").student.model == "somebody/sorter"


def test_a_teacher_has_the_trust_of_its_own_section() -> None:
    config = load_config(EXAMPLE)
    student = config.student.model_copy(update={"trust_remote_code": True})
    alone = evaluation_config(config.model_copy(update={"student": student}), None, "sort")
    assert alone.student.model == config.teacher_model("sort")
    assert not alone.student.trust_remote_code
