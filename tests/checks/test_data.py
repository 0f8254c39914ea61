"""Data and routes that cannot be a run's: each with its key and a remedy."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from async_opd.checks.preflight import preflight
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import RewardConfig
from async_opd.core.errors import Problem
from tests.checks.inputs import GOOD, MODELS, broken_student, config, found, model, one, rows
from tests.data.pictures import RED
from tests.world.cli import Cli

SORT = GOOD[0]


@pytest.mark.parametrize(
    ("entries", "place", "words"),
    [
        ([], "rows.jsonl: ", "has no rows"),
        ([SORT, "{oops"], "rows.jsonl, row 2: ", "JSON"),
        ([SORT, {"data_source": "sort"}], "rows.jsonl, row 2: ", "has no field 'prompt'"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_row(
    entries: list[Any], place: str, words: str, tmp_path: Path
) -> None:
    problem = found(rows(tmp_path, *entries))[0]
    assert place in str(problem)
    assert words in problem.message


@pytest.mark.parametrize(
    ("entries", "overrides", "key", "words"),
    [
        (
            [*GOOD, {"prompt": f"sort {'1' * 200}=", "data_source": "sort"}],
            [],
            "data.train",
            "longer than 119 tokens, the first is row 3",
        ),
        (
            [*GOOD, {"prompt": f"sort {'1' * 20}=", "data_source": "sort"}],
            ["data.max_prompt_tokens=12", "data.eval=[]"],
            "data.train",
            "longer than 12 tokens, the first is row 3",
        ),
        ([*GOOD, {"prompt": "x", "data_source": "add"}], [], "teachers", "'add'"),
        ([SORT], ["data.eval=[]"], "teachers.reverse", "teachers.reverse.sources"),
        (GOOD, ["cold_start={steps: 1}"], "cold_start.data", "2 rows have no 'answer'"),
    ],
)
def test_rows_that_do_not_fit_the_run_are_one_problem(
    entries: list[Any], overrides: list[str], key: str, words: str, tmp_path: Path
) -> None:
    problem = one(rows(tmp_path, *entries), *overrides)
    assert problem.key == key
    assert words in str(problem)


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("data.train=[/no/such.jsonl]", "data.train", "/no/such.jsonl: data.train: does not exist"),
        ("data.train=[/no/such.jsonl]", "data.train", "→ / exists, and has "),
        ("cold_start={steps: 1, data: /no/such.jsonl}", "cold_start.data", "does not exist"),
        ("teachers.reverse.sources=[reverse, sort]", "teachers.reverse.sources", "sort"),
        (
            "checkpoint.keep_best=eval/sorting/accuracy",
            "checkpoint.keep_best",
            "eval/sort/accuracy",
        ),
    ],
)
def test_what_the_data_do_not_allow_is_one_problem(override: str, key: str, words: str) -> None:
    problem = one(override)
    assert problem.key == key
    assert words in str(problem)


@pytest.mark.parametrize(
    "override", ["checkpoint.keep_best=eval/*/accuracy", "cold_start={steps: 1, answers: teacher}"]
)
def test_what_the_data_allow_is_none(override: str, tmp_path: Path) -> None:
    given = [rows(tmp_path, *GOOD)] if "cold" in override else []
    assert found(override, *given) == []


def test_all_missing_fields_come_at_once_with_the_length_that_does_not_fit(tmp_path: Path) -> None:
    override = rows(tmp_path, {"question": "1 + 1", "solution": "2"})
    row, room = found(override, "rollout.max_tokens=2048")
    assert (room.key, "leaves no room for a prompt" in room.message) == ("rollout.max_tokens", True)
    assert "has no field 'prompt' or 'data_source'; it has 'question', 'solution'" in row.message
    assert row.remedy.startswith("set data.prompt: question; give all rows of the source one")
    assert row.remedy.endswith("graded rows need data.answer, too: there is no 'answer'")


def test_the_first_wrong_rows_of_each_file_come_together(tmp_path: Path) -> None:
    wrong = ["{oops", {"prompt": "", "data_source": "sort"}, "[]", {"data_source": "sort"}]
    good = SORT | {"answer": "1"}
    override = rows(tmp_path, good, *wrong, good, "[]", *["[]"] * 9)
    problems = found(override, f"data.eval=[{tmp_path}/rows.jsonl]")
    assert [problem.key for problem in problems] == ["data.train"] * 4 + ["data.eval"] * 4
    places = [problem.where.rpartition(".jsonl, ")[2] for problem in problems[:4]]
    assert places == ["row 2", "row 3", "rows 4, 7", "row 5"]


def without_a_row_for_1(tmp_path: Path) -> list[str]:
    """Overrides of all models, to some whose tokenizer gives the digit 1 a token of no row."""
    models = {"student": "student", "teachers.sort": "teacher-sort"}
    overrides = []
    for key, name in (models | {"teachers.reverse": "teacher-reverse"}).items():
        path = model(tmp_path, name)
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"]["1"] = 500
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        overrides.append(f"{key}.model={path}")
    return overrides


def test_prompts_with_tokens_that_a_model_has_no_row_for_are_refused(tmp_path: Path) -> None:
    problems = found(*without_a_row_for_1(tmp_path))
    assert {problem.key for problem in problems} == {"data.train", "data.eval"}
    assert all("with token 500" in problem.message for problem in problems)


def pictured(folder: Path, **more: Any) -> dict[str, Any]:
    """A row with an image, whose file is in the folder."""
    (folder / "red.png").write_bytes(RED)
    return {"prompt": "<image>sort 2=", "data_source": "sort", "images": ["red.png"]} | more


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"image": {"bytes": None, "path": "cat.png"}}, "the field with images in data.images"),
        ({"audio": "cat.wav"}, "has 'audio', and only text and images are read"),
        ({"images": ["cat.png"]}, "No such file"),
        ({"images": []}, "0 images in 'images' and 1 places for them"),
    ],
)
def test_rows_with_bad_images_or_sounds_are_named(
    tmp_path: Path, more: dict[str, Any], said: str
) -> None:
    problem = found(rows(tmp_path, *GOOD, pictured(tmp_path, **more)))[0]
    assert (problem.key, said in problem.message) == ("data.train", True)
    assert problem.where.endswith("rows.jsonl, row 3")


def test_rows_with_images_are_counted_in_a_note(tmp_path: Path) -> None:
    other = [{"role": "user", "content": [{"type": "image", "path": "red.png"}]}]
    both = [pictured(tmp_path), pictured(tmp_path, prompt=other, images=None)]
    notes = preflight(config(rows(tmp_path, *GOOD, *both)), "c.yaml", 0).notes
    assert [one for one in notes if one.startswith("data.train: ")] == [
        f"data.train: 2 rows have images, the first is 0:2 (1 different ones of {len(RED)} B, the "
        "largest of 8 x 4 pixels)"
    ]


def test_without_pillow_rows_with_images_are_refused_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    problem = found(rows(tmp_path, *GOOD, pictured(tmp_path)))[0]
    assert problem.message.endswith("rows.jsonl needs PIL")
    assert problem.remedy == "pip install 'async-opd[vision]'"


def test_an_empty_column_of_images_is_text(tmp_path: Path) -> None:
    text = {"content": [{"type": "text", "text": "sort 2="}], "role": "user"}
    row = {"prompt": "sort 2=", "data_source": "sort", "image": None, "images": []}
    assert found(rows(tmp_path, *GOOD, row)) == []
    problems = found(rows(tmp_path, *GOOD, row | {"prompt": [text]}))
    assert not any("images" in problem.message for problem in problems)


def alone(*overrides: str) -> RunConfig:
    """Only the teacher ``sort`` of the two, whose data has rows of both."""
    both = config(*overrides)
    return both.model_copy(update={"teachers": {"sort": both.teachers["sort"]}})


def test_the_only_teacher_scores_all_rows() -> None:
    inputs = preflight(alone(), "c.yaml", 0)
    assert inputs.problems == []
    assert alone().teacher_of("reverse") == "sort"
    why = "the only teacher scores all rows, those of reverse too, unless its sources are set"
    assert f"teachers.sort: {why}" in inputs.notes


def test_the_only_teacher_scores_its_sources_if_it_names_them() -> None:
    problems = preflight(alone("teachers.sort.sources=[sort]"), "c.yaml", 0).problems
    assert {problem.message for problem in problems} == {"no teacher for data source 'reverse'"}


def test_a_path_of_the_working_directory_is_written_as_the_config_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    shutil.copytree(MODELS, tmp_path / "models")
    for folder in ("conf", "data"):
        (tmp_path / folder).mkdir()
    rows(tmp_path / "data", *GOOD)
    models = "student: {model: ../models/student}\nteachers: {a: {model: models/teacher-sort}}\n"
    (tmp_path / "conf" / "mine.yaml").write_text(models + "data: {train: ../data/row.jsonl}\n")
    monkeypatch.chdir(tmp_path)
    said = cli("check", "conf/mine.yaml", "data.train=data/rows.jsonl", code=2).err
    assert "relative to the config's folder: write ../data/rows.jsonl" in said
    assert "did you mean" in (said := cli("check", "conf/mine.yaml", code=2).err)
    assert f"{tmp_path}/data/rows.jsonl?" in said.replace("conf/../", "")


def with_reward(grader: str, *overrides: str) -> list[Problem]:
    graded = config(*overrides).model_copy(update={"reward": RewardConfig(grader=grader)})
    return preflight(graded, "c.yaml", 0).problems


def test_rows_that_the_reward_cannot_grade_are_refused(tmp_path: Path) -> None:
    (problem,) = with_reward("exact", rows(tmp_path, *GOOD))
    assert problem.key == "data.train"
    assert "2 rows have no 'answer'" in problem.message


def test_tasks_without_a_written_answer_leave_a_cold_start_nothing_to_train_on() -> None:
    task = "{kind: reasoning_gym, task: graph_color, size: 2}"
    problems = found(f"cold_start={{steps: 1, data: [{task}]}}")
    assert any("2 rows have no 'answer'" in problem.message for problem in problems)


@pytest.mark.parametrize(
    ("answers", "row", "words"),
    [
        ("given", {"prompt": "sort 2=", "image": "cat.png"}, "has 'image'"),
        ("given", {"prompt": "1" * 200}, "longer than 119 tokens"),
        ("given", {"prompt": "x", "answer": None}, "1 rows have no 'answer'"),
        ("teacher", {"prompt": "x", "data_source": "other"}, "no teacher answers data source"),
    ],
)
def test_rows_that_a_cold_start_cannot_train_on_are_refused(
    answers: str, row: dict[str, Any], words: str, tmp_path: Path
) -> None:
    given = {"data_source": "sort", "answer": "1"} | row
    (tmp_path / "cold.jsonl").write_text(json.dumps(given))
    problem = one(f"cold_start={{steps: 1, answers: {answers}, data: {tmp_path}/cold.jsonl}}")
    assert (problem.key, words in problem.message) == ("cold_start.data", True)


@pytest.mark.parametrize(
    ("settings", "refused"),
    [("data: COLD", 1), ("data: COLD, answers: teacher", 0), ("data: [], answers: given", 1)],
)
def test_answers_with_tokens_that_a_model_has_no_row_for_are_refused(
    tmp_path: Path, settings: str, refused: int
) -> None:
    plain = {"prompt": "sort 2=", "data_source": "sort", "answer": "1"}
    (tmp_path / "cold.jsonl").write_text(json.dumps(plain))
    settings = settings.replace("COLD", f"{tmp_path}/cold.jsonl")
    problems = found(*without_a_row_for_1(tmp_path), f"cold_start={{steps: 1, {settings}}}")
    answers = [one for one in problems if "answers have tokens beyond" in one.message]
    assert [one.key for one in answers] == refused * ["cold_start.data"]


def test_a_chat_template_that_is_none_is_a_problem(tmp_path: Path) -> None:
    problems = found(broken_student(tmp_path, "chat_template.jinja", "{% if %}"))
    assert {problem.key for problem in problems} == {"data.train", "data.eval"}


def unanswered(tmp_path: Path) -> str:
    file = tmp_path / "eval.jsonl"
    file.write_text('{"prompt": "sort 1=", "data_source": "sort"}\n')
    return f"data.eval=[{file}]"


def test_evaluation_rows_without_an_answer_are_refused(tmp_path: Path) -> None:
    (problem,) = found(unanswered(tmp_path))
    assert (problem.key, "data.answer" in problem.remedy) == ("data.eval", True)


def test_a_users_own_grader_may_need_no_answer(tmp_path: Path) -> None:
    assert found(unanswered(tmp_path), "eval.grader=math:sqrt") == []


WITHOUT_SOURCE = [{"question": "sort 1=", "answer": "1"}]


@pytest.mark.parametrize(
    ("entries", "overrides", "remedy"),
    [
        ([{"question": "sort 1=", "data_source": "sort"}], [], "set data.prompt: question"),
        ([{"mine": "sort 1=", "data_source": "sort"}], [], "set data.prompt: the field that"),
        (WITHOUT_SOURCE, ["data.prompt=question"], "data_source: NAME}), or set data.route_by"),
        (
            [{**SORT, "answer": "none"}],
            ["data.answer_in=boxed"],
            "set data.answer_in: whole, or remove the row",
        ),
    ],
)
def test_a_field_that_rows_lack_is_answered_with_the_key_to_set(
    entries: list[Any], overrides: list[str], remedy: str, tmp_path: Path
) -> None:
    assert remedy in found(rows(tmp_path, *entries), *overrides)[0].remedy


@pytest.mark.parametrize(
    ("encoding", "row", "words", "how"),
    [
        ("latin-1", 2, "is not UTF-8 at character 18", "iconv -f LATIN1"),
        ("utf-16", 1, "is UTF-16, not UTF-8", "iconv -f UTF-16"),
    ],
)
def test_another_encoding_is_named_with_the_row_and_the_remedy(
    encoding: str, row: int, words: str, how: str, tmp_path: Path
) -> None:
    lines = [json.dumps(one, ensure_ascii=False) for one in (SORT, {"prompt": "sort é"})]
    (tmp_path / "rows.jsonl").write_bytes("\n".join(lines).encode(encoding))
    problem = found(f"data.train=[{tmp_path}/rows.jsonl]")[0]
    assert (problem.message, f"row {row}" in problem.where) == (words, True)
    assert problem.remedy.startswith(f"save the file as UTF-8: {how} -t UTF-8")


def test_a_byte_order_mark_of_utf_8_is_not_a_part_of_the_first_row(tmp_path: Path) -> None:
    lines = [json.dumps(one) for one in GOOD]
    (tmp_path / "rows.jsonl").write_bytes("\n".join(lines).encode("utf-8-sig"))
    assert found(f"data.train=[{tmp_path}/rows.jsonl]") == []


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("my rows.csv", "prompt,data_source\nsort 1=,sort\nx,reverse\n"),
        ("rows.tsv", "prompt\tdata_source\nsort 1=\tsort\nx\treverse\n"),
        ("rows.json", json.dumps(GOOD)),
    ],
)
def test_a_table_is_converted_by_the_command_of_the_remedy(
    name: str, content: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(content)
    remedy = found(f"data.train=['{tmp_path}/{name}']")[0].remedy
    assert remedy.startswith("convert it: python -c ")
    command = remedy.removeprefix("convert it: ").replace("python", sys.executable, 1)
    subprocess.run(command, shell=True, check=True, cwd=tmp_path)
    assert found(f"data.train=[{tmp_path}/rows.jsonl]") == []


def test_an_unknown_data_source_is_not_followed_by_the_teacher_without_prompts(
    tmp_path: Path,
) -> None:
    entries = [{**GOOD[0], "data_source": "sorting"}, GOOD[1]]
    problem = one(rows(tmp_path, *entries), "data.eval=[]")
    assert problem.message == "no teacher for data source 'sorting'"


def test_a_source_at_two_teachers_is_not_followed_by_the_teacher_without_prompts() -> None:
    problem = one("teachers.reverse.sources=[sort]")
    assert "'sort' is a source of teacher sort already" in problem.message


def test_a_fault_of_a_template_is_shown_without_the_class_of_its_error(tmp_path: Path) -> None:
    chat = {"prompt": [{"role": "user", "content": "sort 1="}], "data_source": "sort"}
    problem = one(rows(tmp_path, chat, *GOOD))
    assert problem.message.startswith("a prompt cannot be tokenized: ")
    assert "Error" not in problem.message


def test_too_long_prompts_say_by_how_much_the_response_is_to_be_lowered(tmp_path: Path) -> None:
    def remedy(digits: int, *overrides: str) -> str:
        long = {"prompt": f"sort {'1' * digits}=", "data_source": "sort"}
        return one(rows(tmp_path, *GOOD, long), "data.eval=[]", *overrides).remedy

    assert "lower rollout.max_tokens by 5: prompt, response" in remedy(118)
    assert remedy(200) == "shorten or remove them, or set data.overlong"
    assert "raise data.max_prompt_tokens by 14," in remedy(20, "data.max_prompt_tokens=12")
