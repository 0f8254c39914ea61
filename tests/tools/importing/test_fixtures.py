"""Public configurations, typed anew, become configs that pass, with every key accounted for."""

from __future__ import annotations

import json
import re
import runpy
from functools import reduce
from pathlib import Path
from string import Formatter
from typing import Any

import pytest
import yaml

from async_opd.checks.preflight import preflight
from async_opd.cli import main
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.tools.importing.command import NAMES
from async_opd.tools.importing.frameworks import FRAMEWORKS, framework_of, parse

ROOT = Path(__file__).parents[3]
FIXTURES = sorted((Path(__file__).parent / "fixtures").iterdir())
MAX_LINES = 40
GPUS = 64


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name)
def fixture(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def imported(fixture: Path, folder: Path) -> str:
    target = folder / "config.yaml"
    assert main(["import", str(fixture), "--output", str(target)]) == 0
    return target.read_text()


def test_the_result_loads_and_has_at_most_40_lines_beside_comments(
    fixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_PATH", "/data")
    text = imported(fixture, tmp_path)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) <= MAX_LINES
    config = load_config(tmp_path / "config.yaml")
    assert config.student.model
    assert config.teachers


def test_check_finds_no_problem_once_the_files_exist(
    fixture: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DATA_PATH", "/data")
    imported(fixture, tmp_path)
    config = load_config(tmp_path / "config.yaml")
    tree = yaml.safe_load((tmp_path / "config.yaml").read_text())
    write_rows(config, tmp_path / "rows.jsonl")
    for part in ("train", "eval"):
        for source in tree["data"].get(part, []):
            if isinstance(source, dict) and "path" in source:
                source["path"] = "rows.jsonl"
        if any(isinstance(source, str) for source in tree["data"].get(part, [])):
            tree["data"][part] = ["rows.jsonl"]
    if tree["student"]["model"] == "STUDENT":
        tree["student"]["model"] = "an-owner/a-student"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert preflight(load_config(tmp_path / "config.yaml"), "config.yaml", GPUS).problems == []


def write_rows(config: RunConfig, file: Path) -> None:
    """A row for each teacher, with the fields that the config names."""
    sources = [s for name, t in config.teachers.items() for s in t.sources or [name]]
    rows = []
    for source in sources:
        row: dict[str, Any] = {}
        fields = {config.data.prompt: "1 + 1?", config.data.route_by: source}
        if config.data.answer is not None:
            fields[config.data.answer] = "2"
        for field, value in fields.items():
            *path, last = field.split(".")
            reduce(lambda node, name: node.setdefault(name, {}), path, row)[last] = value
        templates = [t.prompt_template or "" for t in config.teachers.values()]
        for template in templates:
            for _, name, _, _ in Formatter().parse(template):
                row.setdefault(name or "unused", "a text")
        rows.append(json.dumps(row))
    file.write_text("\n".join(rows) + "\n")


def test_every_key_of_the_file_is_named_in_the_comments(fixture: Path, tmp_path: Path) -> None:
    words = set(re.split(r"[\s,:]+", imported(fixture, tmp_path)))
    assert sorted(parse(fixture).keys.keys() - words) == []


def test_the_fixtures_are_of_all_frameworks() -> None:
    found = [framework_of(path, parse(path).keys, None).name for path in FIXTURES]
    assert len(found) >= 12
    assert set(found) == set(FRAMEWORKS) == set(NAMES)


def test_values_that_the_public_configs_name_are_in_the_result(tmp_path: Path) -> None:
    folder = FIXTURES[0].parent
    imported(folder / "verl_qwen3_8b.sh", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    assert (config.student.model, config.teacher_model("teacher")) == (
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-32B",
    )
    assert (config.train.batch_size, config.train.lr, config.train.ranks) == (128, 1e-6, 8)
    assert (config.rollout.max_tokens, config.rollout.engine.max_model_len) == (2048, 3073)
    assert (config.rollout.host, config.rollout.replicas) == ("train", 4)
    assert config.train.weight_decay == 0.01  # their default, which is not ours


def test_teachers_of_several_sources_keep_their_routes(tmp_path: Path) -> None:
    imported(FIXTURES[0].parent / "verl_mopd.sh", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    assert config.teacher_of("openai/gsm8k") == "gsm8k"
    assert config.teacher_of("hiyouga/geometry3k") == "geo3k"


def test_the_only_teacher_scores_all_rows_of_files_and_of_the_hub(tmp_path: Path) -> None:
    imported(FIXTURES[0].parent / "asyncopd_mc64.yaml", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    train, evaluation = (part[0].model_dump() for part in (config.data.train, config.data.eval))
    assert config.teacher_of(train["data_source"]) == "teacher"
    assert Path(train["path"]).parts[-2:] == ("deepmath_difficulty6", "train.parquet")
    assert (evaluation["kind"], evaluation["id"]) == ("hub", "Maxwell-Jia/AIME_2024")
    assert evaluation["data_source"] == "teacher"


def test_variables_of_the_chat_template_are_the_students(tmp_path: Path) -> None:
    imported(FIXTURES[0].parent / "asyncopd_mc64.yaml", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    assert config.student.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("given", ["'{\"enable_thinking\": true}'", "{enable_thinking: true}"])
def test_they_are_read_from_a_section_and_from_json(given: str, tmp_path: Path) -> None:
    file = tmp_path / "gold.yaml"
    file.write_text(
        "model_name_or_path: a\nteacher_model_name_or_path: b\nbeta: 0.5\nmax_steps: 3\n"
        f"dataset_name: c/d\ndataset_train_split: sft\nchat_template_kwargs: {given}\n"
    )
    imported(file, tmp_path)
    config = load_config(tmp_path / "config.yaml")
    assert config.student.chat_template_kwargs == {"enable_thinking": True}
    source = config.data.train[0].model_dump()
    assert (source["kind"], source["id"], source["split"]) == ("hub", "c/d", "sft")


def test_steps_and_versions_are_counted_as_here(tmp_path: Path) -> None:
    imported(FIXTURES[0].parent / "asyncopd_mc64.yaml", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    assert (config.train.batch_size, config.async_.sync_steps) == (64, 4)  # 256 in mini-batches
    assert config.train.steps == 400  # 100 steps of four optimizer steps each
    assert config.async_.staleness_threshold == 4


def test_the_document_has_the_tables_of_the_code() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_import.py"))["document"]()
    assert (ROOT / "docs" / "import.md").read_text() == made, "run python docs/make_import.py"
