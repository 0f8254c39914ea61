"""``async_opd init``: a first config from flags or answers, checked before it is written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_opd.config.keys import all_keys, default_of
from async_opd.config.load import load_config
from async_opd.config.yaml_text import load_yaml
from async_opd.core.errors import ConfigError
from async_opd.tools.first_steps.command import as_options
from async_opd.tools.first_steps.draft import SET, TUNED, Draft, completed, config_text
from tests.world.cli import Cli

STUDENT = ("--student", "models/student")
TWO = ("--teacher", "sort=models/teacher-sort", "--teacher", "reverse=models/teacher-reverse")
SHORT = ("--set", "rollout.max_tokens=8")


@pytest.fixture
def here(tmp_path: Path, quickstart: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with the quickstart's models, and forty rows of each of its files."""
    (tmp_path / "models").symlink_to(Path(quickstart) / "models")
    (tmp_path / "data").mkdir()
    for name in ("train", "eval"):
        lines = (Path(quickstart) / "data" / f"{name}.jsonl").read_text().splitlines(True)
        (tmp_path / "data" / f"{name}.jsonl").write_text("".join(lines[:40]))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_what_init_writes_passes_check(here: Path, cli: Cli) -> None:
    data = ("--data", "data/train.jsonl", "--eval", "data/eval.jsonl")
    cli("init", "two.yaml", *STUDENT, *TWO, *data, *SHORT)
    cli("check", "two.yaml")


def test_a_key_in_place_of_the_file_is_refused(here: Path, cli: Cli) -> None:
    assert (
        "--set train.steps=5"
        in cli("init", "train.steps=5", *STUDENT, *TWO, "--data", "data/train.jsonl", code=2).err
    )


def test_the_file_has_what_was_given_and_paths_relative_to_itself(here: Path, cli: Cli) -> None:
    (here / "configs").mkdir()
    data = ("--data", "sort=data/train.jsonl", "--data", "mirror:reverse=data/eval.jsonl")
    cli("init", "configs/my-run.yaml", *STUDENT, *TWO, *data, *SHORT, "--set", "seed=7")
    written = load_yaml((here / "configs" / "my-run.yaml").read_text())
    assert written["name"] == "my-run"
    assert written["seed"] == 7
    assert written["rollout"]["max_tokens"] == 8
    assert written["student"] == {"model": "../models/student"}
    assert written["teachers"] == {
        "sort": {"model": "../models/teacher-sort"},
        "reverse": {"model": "../models/teacher-reverse", "sources": ["mirror"]},
    }
    assert written["data"]["train"] == [
        {"path": "../data/train.jsonl", "data_source": "sort"},
        {"path": "../data/eval.jsonl", "data_source": "mirror"},
    ]


def test_a_config_with_problems_is_not_written(here: Path, cli: Cli) -> None:
    lacking = ("--teacher", "models/missing", "--data", "data/none.jsonl")
    said = cli("init", "one.yaml", *STUDENT, *lacking, code=2).err
    assert "one.yaml: teachers.teacher.model: no such directory" in said
    assert "data/none.jsonl: data.train: does not exist" in said
    assert not (here / "one.yaml").exists()


def test_an_existing_file_is_replaced_by_force_only(here: Path, cli: Cli) -> None:
    (here / "two.yaml").write_text("mine")
    given = ("two.yaml", *STUDENT, *TWO, "--data", "data/train.jsonl", *SHORT)
    assert "add --force" in cli("init", *given, code=2).err
    assert (here / "two.yaml").read_text() == "mine"
    cli("init", *given, "--force")


def test_without_a_terminal_nothing_is_asked_and_all_missing_arguments_are_reported(
    here: Path, cli: Cli
) -> None:
    said = cli("init", code=2).err
    assert all(f"--{flag}: is missing" in said for flag in ("student", "teacher", "data"))


def test_a_directory_that_is_missing_is_reported(here: Path, cli: Cli) -> None:
    assert "mkdir -p no" in cli("init", "no/such.yaml", code=2).err


def test_what_is_missing_is_asked_until_an_empty_line() -> None:
    answers = ["models/student", "math=m", "code=c", "", "train.jsonl", "", "test.jsonl", ""]
    asked: list[str] = []

    def ask(question: str, default: str) -> str:
        asked.append(question)
        return answers[len(asked) - 1]

    draft = Draft()
    draft.ask(ask)
    assert draft == Draft("models/student", ["math=m", "code=c"], ["train.jsonl"], ["test.jsonl"])
    assert len(asked) == len(answers)


def test_what_is_given_is_not_asked() -> None:
    def never(question: str, default: str) -> str:
        raise AssertionError(question)

    Draft("s", ["t"], ["d"]).ask(never)


def test_a_data_set_of_the_hub_is_named_as_the_config_names_it(tmp_path: Path) -> None:
    draft = Draft("s", ["math=t"], ["hf:openai/gsm8k:main:train", "math=hf:openai/gsm8k:main:test"])
    whole = {"kind": "hub", "id": "openai/gsm8k", "config": "main", "split": "test"}
    assert draft.tree("run", tmp_path)["data"]["train"] == [
        "hf:openai/gsm8k:main:train",
        {**whole, "data_source": "math"},
    ]


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    tree = Draft("s", ["models/a=b"], ["data/step=3.jsonl"]).tree("run", tmp_path)
    assert tree["teachers"] == {"teacher": {"model": "models/a=b"}}
    assert tree["data"]["train"] == ["data/step=3.jsonl"]


def test_two_teachers_of_one_name_and_unknown_teachers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        Draft("s", ["one", "two"], ["math:maths=d.jsonl"]).tree("run", tmp_path)
    two, unknown = caught.value.problems
    assert "there are two teachers teacher: one and two" in two.message
    assert ("math:maths" in unknown.message, unknown.remedy) == (
        True,
        "name one of --teacher (teacher)",
    )


def uncommented(text: str) -> Iterator[str]:
    """The lines of a config whose keys behind ``#`` are set too."""
    for line in text.splitlines():
        key = line.lstrip().removeprefix("# ").partition(":")[0]
        commented = line.lstrip().startswith("# ") and any(
            hint.endswith(f".{key}") for hint in TUNED
        )
        yield line.replace("# ", "", 1) if commented else line


@pytest.mark.parametrize("kind", ["forward_kl", "k1"])
def test_keys_that_are_commented_out_have_their_defaults(tmp_path: Path, kind: str) -> None:
    tree = Draft("s", ["t"], ["d.jsonl"], ["e.jsonl"]).tree("run", tmp_path)
    text = config_text(completed(tree | {"loss": {"kind": kind}}), "run.yaml")
    more = "\n".join(uncommented(text))
    assert load_yaml(more) != load_yaml(text)
    assert load_config(load_yaml(more)) == load_config(load_yaml(text))


def test_comments_are_the_docstrings_of_the_keys(tmp_path: Path) -> None:
    text = config_text(completed(Draft("s", ["t"], ["d"]).tree("run", tmp_path)), "run.yaml")
    assert "  # n: 4  # Rollouts of each prompt (its group)\n" in text
    assert "async:  # Bounds of staleness" in text
    assert max(map(len, text.splitlines())) <= 100
    assert "…" not in text
    assert len(text.splitlines()) <= 45


def test_the_keys_of_a_first_config_are_keys_with_a_default() -> None:
    assert set(SET) | set(TUNED) <= set(all_keys())
    assert [key for key in SET if default_of(key) is None] == []


def test_on_a_terminal_what_is_missing_is_asked(
    here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    lists = {"Teacher": ["sort=models/teacher-sort"], "Training": ["data/train.jsonl"]}
    answers = {"Student": ["models/student"]} | lists

    def ask(question: object, **_: object) -> str:
        left = answers.get(str(question).split()[0], [])
        if not left:
            raise EOFError  # Ctrl-D
        return left.pop()

    monkeypatch.setattr("rich.prompt.Prompt.ask", ask)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    cli("init", *SHORT)
    written = load_yaml((here / "config.yaml").read_text())
    assert written["teachers"] == {"sort": {"model": "models/teacher-sort"}}
    cli("check", "config.yaml")


def test_answers_that_lack_a_key_are_a_command_to_which_the_remedies_add(
    here: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    (here / "mine.jsonl").write_text('{"question": "sort 21="}\n')
    answers = {"Student": ["models/student"], "Teacher": ["models/teacher-sort"]}
    answers["Training"] = ["mine.jsonl"]

    def ask(question: object, **_: object) -> str:
        left = answers.get(str(question).split()[0], [])
        return left.pop() if left else ""

    monkeypatch.setattr("rich.prompt.Prompt.ask", ask)
    for stream in (sys.stdin, sys.stdout):
        monkeypatch.setattr(stream, "isatty", lambda: True)
    said = cli("init", *SHORT, code=2).err
    assert "add --set data.prompt=question" in said
    assert "(--data NAME=PATH)" in said
    command = said.partition("async_opd init ")[2].split()
    assert command == [
        *("config.yaml", "--student=models/student", "--teacher=models/teacher-sort"),
        *("--data=mine.jsonl", "--set=rollout.max_tokens=8"),
    ]
    repaired = [one.replace("--data=", "--data=sort=") for one in command]
    cli("init", *repaired, "--set", "data.prompt=question")


def test_keys_of_a_remedy_are_options_and_quoted_ones_stay_one_word() -> None:
    remedy = "share GPUs: rollout.placement=colocated 'teachers.a b.with=rollout'; or set a.b: c"
    options = "share GPUs: --set rollout.placement=colocated --set 'teachers.a b.with=rollout'"
    assert as_options(remedy) == f"{options}; or add --set a.b=c"
