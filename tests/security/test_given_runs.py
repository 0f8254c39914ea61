"""A stranger's run directory: no command runs its code, or loads a model that lies elsewhere."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from safetensors import safe_open
from safetensors.numpy import save_file

from async_opd.cluster import launch_parts
from async_opd.files.durable import written_file
from async_opd.files.kept_steps import KEPT, kept_name
from async_opd.tools.replay.kept_run import replay_plan
from tests.fuzz.command import STUDENT, Said, command
from tests.tools.replay import kept
from tests.tools.test_export import run_of
from trainer.replay.kept_step import KeptStep, Record, StepResult, write_kept

EXAMPLE = kept.QUICKSTART
Change = Callable[[dict[str, Any]], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run directory, beside its student."""
    return run_of(tmp_path_factory.mktemp("made"))


@pytest.fixture
def run_dir(made: Path, tmp_path: Path) -> Path:
    """A copy of it, as one downloads it, with the student in it."""
    shutil.copytree(made.parent, tmp_path / "theirs")
    forge(tmp_path / "theirs" / "run", lambda tree: tree["student"].update(model="../student"))
    return tmp_path / "theirs" / "run"


def forge(run_dir: Path, change: Change) -> None:
    """Changes the config in config.yaml, and in the checkpoint, whose sums are made again."""
    tree = yaml.safe_load((run_dir / "config.yaml").read_text())
    change(tree)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree))
    checkpoint = run_dir / "checkpoints" / "step_2"
    identity = json.loads((checkpoint / "config.json").read_text())
    change(identity["config"])
    (checkpoint / "config.json").write_text(json.dumps(identity))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["config.json"] = asdict(written_file(checkpoint / "config.json"))
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))


def exported(run_dir: Path, *flags: str) -> Said:
    checkpoint = run_dir / "checkpoints" / "step_2"
    return command("export", str(checkpoint), str(run_dir.parent / "out"), *flags)


def evaluated(run_dir: Path, *flags: str) -> Said:
    checkpoint, out = run_dir / "checkpoints" / "step_2", run_dir.parent / "out"
    return command("eval", str(EXAMPLE), str(checkpoint), "--out", str(out), *flags)


COMMANDS = [exported, evaluated]


@pytest.fixture
def exploded(run_dir: Path) -> Path:
    """The file that the code of the trusted student makes."""
    student, made = run_dir.parent / "student", run_dir.parent / "exploded"
    classes = {"AutoConfig": "code_of_mine.C", "AutoModelForCausalLM": "code_of_mine.M"}
    config = {"model_type": "mine", "auto_map": classes}
    (student / "config.json").write_text(json.dumps(config))
    (student / "code_of_mine.py").write_text(f"import os; os.makedirs({str(made)!r})")
    forge(run_dir, lambda tree: tree["student"].update(trust_remote_code=True))
    return made


@pytest.mark.parametrize("use", COMMANDS)
def test_code_of_a_runs_student_does_not_run(
    run_dir: Path, exploded: Path, use: Callable[..., Said]
) -> None:
    said = use(run_dir)
    assert not exploded.exists()
    assert said.code == 2
    assert "student.trust_remote_code" in said.err
    assert "add --trust-remote-code: it permits all that the directory names" in said.err


def test_it_runs_where_the_command_line_says_so(run_dir: Path, exploded: Path) -> None:
    with contextlib.suppress(Exception):  # the code has no model
        exported(run_dir, "--trust-remote-code")
    assert exploded.exists()


@pytest.mark.parametrize("flags", [(), ("--trust-remote-code",)])
@pytest.mark.parametrize("use", COMMANDS)
def test_no_hub_is_asked_for_a_model_that_a_run_names(
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    use: Callable[..., Said],
    flags: tuple[str, ...],
) -> None:
    import transformers

    def asked(*_: Any, **named: Any) -> Any:
        pytest.fail("the student is loaded")

    monkeypatch.setattr(transformers.AutoConfig, "from_pretrained", asked)
    forge(run_dir, lambda tree: tree["student"].update(model="stranger/model"))
    said = use(run_dir, *flags)
    assert said.code == 2
    assert "stranger/model is not a directory, and is not downloaded" in said.err


def test_a_student_that_leads_to_another_model_is_refused(run_dir: Path) -> None:
    file = run_dir.parent / "student" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"text_model_id": "stranger/model"}))
    said = exported(run_dir)
    assert (said.code, "config.json: text_model_id" in said.err) == (2, True)


def test_a_student_with_a_link_out_of_it_is_refused(run_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "id_rsa").write_text("private")
    (run_dir.parent / "student" / "notes.txt").symlink_to(tmp_path / "id_rsa")
    said = exported(run_dir)
    assert (said.code, "out of the model" in said.err) == (2, True)


def test_a_checkpoint_with_another_config_than_the_run_is_refused(run_dir: Path) -> None:
    tree = yaml.safe_load((run_dir / "config.yaml").read_text())
    tree["loss"]["top_k"] = 5
    (run_dir / "config.yaml").write_text(yaml.safe_dump(tree))
    said = exported(run_dir)
    assert said.code == 2
    assert "loss.top_k: is 5, but 6 in the record of the checkpoint" in said.err


def source(tree: dict[str, Any], part: str) -> None:
    tree["data"][part] = [{"kind": "user", "function": "theirs:rows"}]


NAMED: dict[str, Change] = {
    "student.trust_remote_code": lambda tree: tree["student"].update(trust_remote_code=True),
    "teachers.t.trust_remote_code": lambda tree: tree["teachers"]["t"].update(
        trust_remote_code=True
    ),
    "loss.function": lambda tree: tree.update(loss={"kind": "user", "function": "theirs:loss"}),
    "eval.grader": lambda tree: tree["eval"].update(grader="theirs.py:grade"),
    "reward.grader": lambda tree: (
        tree.update(reward={"grader": "theirs:grade"}),  # type: ignore[func-returns-value]
        tree["rollout"].update(n=2),
    )[0],
    "data.train.function": lambda tree: source(tree, "train"),
    "data.eval.function": lambda tree: source(tree, "eval"),
    "log.loggers": lambda tree: tree["log"].update(loggers=["theirs:log"]),
    "sync.backend": lambda tree: tree["sync"].update(backend="theirs:"),
    "cluster.address": lambda tree: tree["cluster"].update(address="10.0.0.9:6379"),
}


@pytest.mark.parametrize("key", NAMED)
def test_a_run_that_names_code_is_exported_only_where_the_command_line_says_so(
    run_dir: Path, key: str
) -> None:
    forge(run_dir, NAMED[key])
    out = run_dir.parent / "out"
    said = command("export", str(run_dir), str(out))
    assert said.code == 2
    assert f"{key}: found" in said.err
    assert "--trust-remote-code" in said.err
    assert command("export", str(run_dir), str(out), "--trust-remote-code").code == 0


def test_a_model_that_is_given_has_code_only_where_the_command_line_says_so(
    run_dir: Path,
) -> None:
    given = ("eval", str(EXAMPLE), str(run_dir), "student.trust_remote_code=true")
    said = command(*given, "--out", str(run_dir.parent / "out"))
    assert said.code == 2
    assert "the config trusts the code of its student" in said.err
    assert "--trust-remote-code" in said.err


@pytest.fixture
def kept_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run directory with a kept step, which may be read but not computed again."""

    def started(*_: Any, **named: Any) -> Any:
        pytest.fail("the step is computed")

    monkeypatch.setattr(launch_parts, "launch_replayer", started)
    folder = tmp_path / "theirs"
    kept.begin(kept.config_of(folder), folder)
    keep(folder, lambda tree: None)
    return folder


def keep(folder: Path, change: Change, threads: str | None = "1") -> None:
    """Writes step 1, whose record has another config."""
    tree = kept.config_of(folder).model_dump(mode="json", by_alias=True)
    change(tree)
    result = StepResult(1, "part", (), {}, 1.0)
    platform = {} if threads is None else {"threads": threads}
    record = Record(result, 0, 1, 0, platform, {}, tree)
    (folder / KEPT).mkdir(exist_ok=True)
    write_kept(folder / KEPT / kept_name(1, 0, 1), KeptStep(record, (), np.zeros((0, 16))))


def replayed(folder: Path, *flags: str) -> Said:
    return command("replay", str(folder), "--step", "1", *flags)


def test_the_record_of_a_kept_step_is_used_as_it_is(kept_run: Path) -> None:
    plan = replay_plan(kept_run, 1)
    assert plan.config == kept.config_of(kept_run)


@pytest.mark.parametrize("key", sorted(NAMED.keys() - {"cluster.address"}))
def test_a_record_that_names_code_is_not_replayed(kept_run: Path, key: str) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["teachers"]["t"] = tree["teachers"].pop("sort")
        NAMED[key](tree)

    keep(kept_run, change)
    said = replayed(kept_run)
    assert said.code == 2
    assert f"{key}: found" in said.err


def test_a_record_of_another_run_is_not_replayed_even_where_code_is_trusted(
    kept_run: Path,
) -> None:
    keep(kept_run, lambda tree: tree["student"].update(model=str(STUDENT), trust_remote_code=True))
    said = replayed(kept_run, "--trust-remote-code")
    assert said.code == 2
    assert "student.trust_remote_code: is False, but True in the record" in said.err


def test_no_hub_is_asked_for_a_model_that_a_record_names(kept_run: Path) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["student"]["model"] = "stranger/model"

    keep(kept_run, change)
    tree = yaml.safe_load((kept_run / "config.yaml").read_text())
    change(tree)
    (kept_run / "config.yaml").write_text(yaml.safe_dump(tree))
    said = replayed(kept_run)
    assert said.code == 2
    assert "stranger/model is not a directory, and is not downloaded" in said.err


def test_a_record_does_not_decide_where_a_replay_writes_and_which_cluster_it_joins(
    kept_run: Path, tmp_path: Path
) -> None:
    def change(tree: dict[str, Any]) -> None:
        tree["run_dir"] = str(tmp_path / "elsewhere")
        tree["cluster"]["address"] = "10.0.0.9:6379"

    keep(kept_run, change)
    config = replay_plan(kept_run, 1).config
    assert (config.run_dir, config.cluster.address) == (str(kept_run), None)


@pytest.mark.parametrize("threads", [None, "x", "0", "99999999", "1" * 400])
def test_the_threads_of_a_record_are_a_number_of_a_machine(
    kept_run: Path, threads: str | None
) -> None:
    keep(kept_run, lambda tree: None, threads)
    said = replayed(kept_run)
    assert said.code == 2
    assert "as the threads of the rank" in said.err


@pytest.mark.parametrize(
    ("place", "depth"), [('"config":{', 800), ('"config":{', 100_000), ("{", 100_000)]
)
def test_a_record_that_is_nested_too_deep_is_damaged(
    kept_run: Path, place: str, depth: int
) -> None:
    file = kept_run / KEPT / kept_name(1, 0, 1)
    with safe_open(file, "np") as opened:
        about, arrays = opened.metadata(), {"entries": opened.get_tensor("entries")}
    deep = "[" * depth + "]" * depth
    record = about["record"].replace(place, f'{place}"zz":{deep},', 1)
    save_file(arrays, file, metadata=about | {"record": record})
    said = replayed(kept_run)
    assert said.code == 2
    assert "cannot be read" in said.err


@pytest.mark.parametrize("inner", ['["@"]', '{"a": "@"}'])
def test_a_checkpoint_whose_config_is_nested_too_deep_is_refused(run_dir: Path, inner: str) -> None:
    deep = inner
    for _ in range(900):
        deep = deep.replace('"@"', inner)
    checkpoint = run_dir / "checkpoints" / "step_2"
    identity = json.loads((checkpoint / "config.json").read_text())
    identity["config"]["x"] = "@@"
    content = json.dumps(identity).replace('"@@"', deep)
    (checkpoint / "config.json").write_text(content)
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest["config.json"] = asdict(written_file(checkpoint / "config.json"))
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert exported(run_dir).code == 2


def test_a_folder_in_the_place_of_the_models_card_is_refused(run_dir: Path) -> None:
    (run_dir / "model" / "README.md").mkdir()
    said = command("export", str(run_dir), str(run_dir.parent / "out"))
    assert said.code == 2
    assert "README.md is a directory" in said.err
    assert not (run_dir.parent / "out").exists()


def test_no_card_shows_which_text_is_the_value_of_a_variable(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRIVATE_HOST", "buildbox-417")

    def change(tree: dict[str, Any]) -> None:
        tree["log"]["project"] = "guess buildbox-416 buildbox-417"
        endpoint = {"kind": "endpoint", "urls": ["http://127.0.0.1:9/"], "served_model": "x"}
        name = next(iter(tree["teachers"]))
        tree["teachers"][name] = endpoint | {"model": "a/b", "api_key_env": "PRIVATE_HOST"}

    forge(run_dir, change)
    said = command("export", str(run_dir), str(run_dir.parent / "out"))
    assert said.code == 2
    assert "has the value of a secret variable" in said.err
    assert "buildbox-417" not in said.err
    assert not (run_dir.parent / "out").exists()


def test_a_file_that_is_no_template_by_its_name_is_not_read_as_one(
    run_dir: Path, tmp_path: Path
) -> None:
    (tmp_path / "id_rsa").write_text("private")
    file = str(tmp_path / "id_rsa")
    forge(run_dir, lambda tree: tree["student"].update(chat_template_file=file))
    said = exported(run_dir)
    assert said.code == 2
    assert "student.chat_template_file: found" in said.err
    assert "its name is not that of a template" in said.err


def test_a_replay_joins_no_cluster_that_runs_here(
    kept_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    tree = yaml.safe_load((kept_run / "config.yaml").read_text())
    tree["cluster"]["address"] = "auto"
    (kept_run / "config.yaml").write_text(yaml.safe_dump(tree))
    said = replayed(kept_run)
    assert (said.code, "cluster.address: found 'auto'" in said.err) == (2, True)


def test_an_export_of_a_run_that_joined_the_cluster_here_needs_none(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    forge(run_dir, lambda tree: tree["cluster"].update(address="auto"))
    assert exported(run_dir).code == 0
