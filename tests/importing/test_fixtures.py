"""Public configurations, typed anew, become configs that pass, with every key accounted for."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest

from async_opd.cli import main
from async_opd.config.load import load_config
from async_opd.importing.command import NAMES
from async_opd.importing.frameworks import FRAMEWORKS, framework_of, parse

ROOT = Path(__file__).parents[2]
FIXTURES = sorted((Path(__file__).parent / "fixtures").iterdir())
MAX_LINES = 40


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


def test_every_key_of_the_file_is_named_in_the_comments(fixture: Path, tmp_path: Path) -> None:
    words = set(re.split(r"[\s,:]+", imported(fixture, tmp_path)))
    assert sorted(parse(fixture).keys.keys() - words) == []


def test_every_fixture_names_its_source_and_the_date(fixture: Path) -> None:
    assert re.match(r"# Facts of github\.com/.*2026-11-22\.\n", fixture.read_text())


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


def test_steps_and_versions_are_counted_as_here(tmp_path: Path) -> None:
    imported(FIXTURES[0].parent / "asyncopd_mc64.yaml", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    assert (config.train.batch_size, config.async_.sync_steps) == (64, 4)  # 256 in mini-batches
    assert config.train.steps == 400  # 100 steps of four optimizer steps each
    assert config.async_.staleness_threshold == 4


def test_the_document_has_the_tables_of_the_code() -> None:
    made = runpy.run_path(str(ROOT / "docs" / "make_import.py"))["document"]()
    assert (ROOT / "docs" / "import.md").read_text() == made, "run python docs/make_import.py"
