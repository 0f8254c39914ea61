"""Public configurations, typed anew, become configs that pass, with every key accounted for."""

from __future__ import annotations

import json
import re
from functools import cache, reduce
from pathlib import Path
from string import Formatter
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml

from async_opd.checks.preflight import preflight
from async_opd.cli import main
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.yaml_text import load_yaml
from async_opd.tools.importing.command import NAMES, imported
from async_opd.tools.importing.draft import Draft, Expression
from async_opd.tools.importing.frameworks import FRAMEWORKS, drafted, framework_of, parse

FOLDER = Path(__file__).parent / "fixtures"
FIXTURES = sorted(FOLDER.iterdir())
EXPECTED: dict[str, dict[str, Any]] = load_yaml(
    (FOLDER.parent / "expected.yaml").read_text(encoding="utf-8")
)
MAX_LINES = 40
GPUS = 64
FILLED = {
    "train.lr": 1e-6,
    "train.steps": 9,
    "train.warmup_steps": 3,
    "async.sync_steps": 1,
    "checkpoint.every": 5,
    "eval.every": 5,
    "loss.kind": "k1",
    "log.wandb": "off",
    "reward.grader": "math_verify",
    "data.overlong": "refuse",
    "data.eval": "data/eval.jsonl",
    "name": "a-name",
}
"""Values that a user may write for placeholders, by our key."""
MODELS = {"STUDENT": "an-owner/a-student", "TEACHER": "an-owner/a-teacher"}


keys_of = cache(lambda path: parse(path).keys)


@pytest.fixture(autouse=True)
def data_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA_PATH", "/data")


@pytest.fixture(params=FIXTURES, ids=lambda path: path.name)
def fixture(request: pytest.FixtureRequest) -> Path:
    return Path(request.param)


def draft_of(fixture: Path, **changed: Any) -> Draft:
    """The draft of a file, with some of its values changed."""
    keys = keys_of(fixture)
    framework = framework_of(fixture, keys, None)
    return drafted(framework, {**keys, **changed})


def at(tree: Any, key: str) -> Any:
    """The value at a dotted key; KeyError if the tree does not have it."""
    return reduce(lambda node, name: node[name], key.split("."), tree)


def filled(text: str) -> str:
    """The config once the user has written a value for each placeholder."""

    def value(node: Any, key: str) -> Any:
        if isinstance(node, dict):
            return {name: value(one, f"{key}.{name}".lstrip(".")) for name, one in node.items()}
        if node == "FILL_IN":
            return "{prompt}" if key.endswith("prompt_template") else FILLED[key]
        return MODELS.get(node, node) if isinstance(node, str) else node

    tree = value(yaml.safe_load(text), "")
    if "FILL_IN" in yaml.safe_load(text).get("loss", {}).values():
        tree["loss"] = {"kind": FILLED["loss.kind"]}
    return yaml.safe_dump(tree)


def mapped_lines(text: str) -> list[tuple[str, str, Any]]:
    """Their key, ours and the value of each line under "Mapped" and "Defaults there"."""
    joined = re.sub(r"\n#     +", " ", text)
    found = []
    for part in re.split(r"^# (?=\S)", joined, flags=re.MULTILINE)[1:]:
        title, *lines = part.splitlines()
        if title in ("Mapped:", "Defaults there:"):
            for line in lines:
                if line.startswith("#   - "):
                    keys, ours, value = re.split(r" → |: ", line[6:], maxsplit=2)
                    found += [(theirs, ours, load_yaml(value)) for theirs in keys.split(", ")]
    return found


def written(fixture: Path, folder: Path) -> str:
    """The config that the command writes, once for each file."""
    text = _written(fixture)
    (folder / "config.yaml").write_text(text)
    return text


@cache
def _written(fixture: Path) -> str:
    """Of the command, whose exit code is that of the config's placeholders."""
    draft = draft_of(fixture)
    waits = bool(draft.fill_in or draft.another)
    with TemporaryDirectory() as folder:
        target = Path(folder) / "config.yaml"
        assert main(["import", str(fixture), "--output", str(target)]) == (2 if waits else 0)
        return target.read_text()


def test_the_result_loads_and_has_at_most_40_lines_beside_comments(
    fixture: Path, tmp_path: Path
) -> None:
    text = written(fixture, tmp_path)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    assert len(lines) <= MAX_LINES
    (tmp_path / "config.yaml").write_text(filled(text))
    config = load_config(tmp_path / "config.yaml")
    assert config.student.model
    assert config.teachers


def test_every_mapped_line_is_the_value_at_its_key_in_the_written_config(
    fixture: Path, tmp_path: Path
) -> None:
    text = written(fixture, tmp_path)
    tree = load_yaml(text)
    lines = mapped_lines(text)
    assert len(lines) >= 5
    assert [(ours, value) for _, ours, value in lines if at(tree, ours) != value] == []


def test_a_value_that_needs_no_conversion_is_the_same_there_and_in_the_written_config(
    fixture: Path, tmp_path: Path
) -> None:
    text = written(fixture, tmp_path)
    keys = keys_of(fixture)
    table = framework_of(fixture, keys, None).table
    plain = {key for key, entry in table.items() if entry.ours and entry.convert == "same"}
    single = {key for key in plain if not table[key].together} & keys.keys()
    compared = [(keys[k], value) for k, ours, value in mapped_lines(text) if k in single]
    assert [pair for pair in compared if pair[0] != pair[1]] == []


def test_a_computed_value_is_never_replaced_by_a_guess(fixture: Path) -> None:
    """Of each key that was mapped: were it computed, no key here would have another value."""
    if fixture.suffix == ".toml":
        return  # all of its values are literals
    known = draft_of(fixture)
    guessed = []
    for key in known.mapped:
        draft = draft_of(fixture, **{key: Expression("settings.of_the_run")})
        for ours, value in draft.ours.items():
            if value != known.ours.get(ours) and ours not in draft.fill_in:
                guessed.append((key, ours, value, known.ours.get(ours)))
        assert key in draft.unreadable
    assert guessed == []


def test_the_teacher_is_never_the_student(fixture: Path) -> None:
    known = draft_of(fixture)
    student = [key for key, ours in known.mapped.items() if "student.model" in ours]
    draft = draft_of(fixture, **dict.fromkeys(student, "an/only-student"))
    models = [value for key, value in draft.ours.items() if key.startswith("teachers.")]
    assert "an/only-student" not in models


@pytest.mark.parametrize("name", EXPECTED)
def test_values_that_were_read_off_a_public_run_by_hand_are_in_the_written_config(
    name: str, tmp_path: Path
) -> None:
    tree = load_yaml(written(FOLDER / name, tmp_path))
    expected, draft = EXPECTED[name], draft_of(FOLDER / name)
    wrong = {key: value for key, value in expected["values"].items() if at(tree, key) != value}
    assert {key: at(tree, key) for key in wrong} == wrong
    assert sorted(draft.fill_in) == sorted(expected.get("fill in", []))
    assert [one.partition(":")[0] for one in draft.another] == expected.get("another", [])


def test_at_least_ten_public_runs_were_compared_by_hand() -> None:
    assert len(EXPECTED) >= 10
    assert {*EXPECTED} <= {path.name for path in FIXTURES}


def test_check_finds_no_problem_once_the_files_exist(fixture: Path, tmp_path: Path) -> None:
    text = filled(written(fixture, tmp_path))
    (tmp_path / "config.yaml").write_text(text)
    config = load_config(tmp_path / "config.yaml")
    tree = yaml.safe_load(text)
    write_rows(config, tmp_path / "rows.jsonl")
    for part in ("train", "eval"):
        for source in tree["data"].get(part, []):
            if isinstance(source, dict) and "path" in source:
                source["path"] = "rows.jsonl"
        if any(isinstance(source, str) for source in tree["data"].get(part, [])):
            tree["data"][part] = ["rows.jsonl"]
    for name in [tree["student"], *tree["teachers"].values()]:
        if str(name.get("model", "")).startswith((".", "/")):
            name["model"] = "an-owner/a-model"
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
    words = set(re.split(r"[\s,:]+", written(fixture, tmp_path)))
    assert sorted(keys_of(fixture).keys() - words) == []


def test_the_fixtures_are_of_all_frameworks() -> None:
    found = [framework_of(path, keys_of(path), None).name for path in FIXTURES]
    assert len(found) >= 12
    assert set(found) == set(FRAMEWORKS) == set(NAMES)


def test_values_that_the_public_configs_name_are_in_the_result(tmp_path: Path) -> None:
    written(FOLDER / "verl_qwen3_8b.sh", tmp_path)
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
    written(FOLDER / "verl_mopd.sh", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    assert config.teacher_of("openai/gsm8k") == "gsm8k"
    assert config.teacher_of("hiyouga/geometry3k") == "geo3k"


def test_the_only_teacher_scores_all_rows_of_files_and_of_the_hub(tmp_path: Path) -> None:
    written(FOLDER / "asyncopd_mc64.yaml", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    train, evaluation = (part[0].model_dump() for part in (config.data.train, config.data.eval))
    assert config.teacher_of(train["data_source"]) == "teacher"
    assert Path(train["path"]).parts[-2:] == ("deepmath_difficulty6", "train.parquet")
    assert (evaluation["kind"], evaluation["id"]) == ("hub", "Maxwell-Jia/AIME_2024")
    assert evaluation["data_source"] == "teacher"


def test_variables_of_the_chat_template_are_the_students(tmp_path: Path) -> None:
    written(FOLDER / "asyncopd_mc64.yaml", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    assert config.student.chat_template_kwargs == {"enable_thinking": False}


@pytest.mark.parametrize("given", ["'{\"enable_thinking\": true}'", "{enable_thinking: true}"])
def test_they_are_read_from_a_section_and_from_json(given: str, tmp_path: Path) -> None:
    file = tmp_path / "gold.yaml"
    file.write_text(
        "model_name_or_path: a\nteacher_model_name_or_path: b\nbeta: 0.5\nmax_steps: 3\n"
        f"dataset_name: c/d\ndataset_train_split: sft\nchat_template_kwargs: {given}\n"
    )
    (tmp_path / "config.yaml").write_text(filled(imported(file)[1]))
    config = load_config(tmp_path / "config.yaml")
    assert config.student.chat_template_kwargs == {"enable_thinking": True}
    source = config.data.train[0].model_dump()
    assert (source["kind"], source["id"], source["split"]) == ("hub", "c/d", "sft")


def test_steps_and_versions_are_counted_as_here(tmp_path: Path) -> None:
    written(FOLDER / "asyncopd_mc64.yaml", tmp_path)
    config = load_config(tmp_path / "config.yaml")
    assert (config.train.batch_size, config.async_.sync_steps) == (64, 4)  # 256 in mini-batches
    assert config.train.steps == 400  # 100 steps of four optimizer steps each
    assert config.async_.staleness_threshold == 4
