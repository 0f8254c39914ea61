"""Preflight: every kind of bad input, each with its key and a remedy, all reported together."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from async_opd.core.config import RewardConfig, RunConfig
from async_opd.core.devices import gpu_count
from async_opd.core.errors import Problem
from async_opd.core.load import load_config
from async_opd.core.preflight import preflight

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
MODELS = EXAMPLE.parent / "quickstart" / "models"
TASKS = ("sort", "reverse")


def config(*overrides: str) -> RunConfig:
    return load_config(EXAMPLE, overrides)


def found(*overrides: str, gpus: int = 0) -> list[Problem]:
    return preflight(config(*overrides), "c.yaml", gpus).problems


def one(*overrides: str, gpus: int = 0) -> Problem:
    (problem,) = found(*overrides, gpus=gpus)
    return problem


def rows(tmp_path: Path, *entries: Any) -> str:
    file = tmp_path / "rows.jsonl"
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    file.write_text("\n".join(lines))
    return f"data.train=[{file}]"


GOOD = [{"prompt": "sort 1=", "data_source": "sort"}, {"prompt": "x", "data_source": "reverse"}]


def test_the_quickstart_has_no_problem() -> None:
    assert found() == []


def test_a_missing_model_is_named() -> None:
    problem = one("student.model=/no/such/model")
    assert (problem.key, problem.where) == ("student.model", "c.yaml")
    assert "/no/such/model" in problem.message


def test_a_missing_data_file_is_named() -> None:
    problem = found("data.train=[/no/such.jsonl]")[0]
    assert (problem.where, problem.message) == ("/no/such.jsonl", "does not exist")


def test_an_empty_data_source_is_refused(tmp_path: Path) -> None:
    assert found(rows(tmp_path))[0].message == "has no rows"


def test_a_broken_line_is_named_by_its_number(tmp_path: Path) -> None:
    assert found(rows(tmp_path, GOOD[0], "{oops"))[0].where.endswith("rows.jsonl, row 2")


def test_a_row_without_a_prompt_is_named(tmp_path: Path) -> None:
    problem = found(rows(tmp_path, GOOD[0], {"data_source": "sort"}))[0]
    assert "has no field 'prompt'" in problem.message


def test_a_prompt_that_the_models_cannot_hold_is_refused(tmp_path: Path) -> None:
    long = {"prompt": "sort " + "1" * 200 + "=", "data_source": "sort"}
    problem = one(rows(tmp_path, *GOOD, long))
    assert (problem.where, problem.key) == (str(tmp_path / "rows.jsonl"), "data.train")
    assert "longer than 119 tokens, the first is row 3" in problem.message
    assert "rollout.max_tokens" in problem.remedy


def test_a_response_that_leaves_no_room_for_prompts_is_refused() -> None:
    assert one("rollout.max_tokens=128").key == "rollout.max_tokens"


def test_a_data_source_without_a_teacher_is_refused(tmp_path: Path) -> None:
    problem = one(rows(tmp_path, *GOOD, {"prompt": "x", "data_source": "add"}))
    assert (problem.key, "'add'" in problem.message) == ("teachers", True)


def test_a_teacher_that_no_data_source_uses_is_refused(tmp_path: Path) -> None:
    problem = one(rows(tmp_path, GOOD[0]), "data.eval=[]")
    assert problem.key == "teachers.reverse"
    assert "teachers.reverse.sources" in problem.remedy


def test_two_teachers_of_one_data_source_are_refused() -> None:
    assert one("teachers.reverse.sources=[reverse, sort]").key == "teachers.reverse.sources"


def other_tokenizer(tmp_path: Path) -> Path:
    path = tmp_path / "teacher"
    shutil.copytree(MODELS / "teacher-sort", path)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = "1", "2"
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    return path


def test_a_teacher_with_another_vocabulary_is_refused(tmp_path: Path) -> None:
    problem = one(f"teachers.sort.model={other_tokenizer(tmp_path)}")
    assert problem.key == "teachers.sort.model"
    assert "different tokenizers" in problem.message


def test_a_teacher_whose_vocabulary_does_not_cover_the_tokenizer_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "teacher"
    shutil.copytree(MODELS / "teacher-sort", path)
    content = json.loads((path / "config.json").read_text()) | {"vocab_size": 64}
    (path / "config.json").write_text(json.dumps(content))
    assert "vocabulary of 64" in one(f"teachers.sort.model={path}").message


def test_prompts_with_tokens_that_a_model_has_no_row_for_are_refused(tmp_path: Path) -> None:
    overrides = []
    for key, name in (("student", "student"), *((f"teachers.{t}", f"teacher-{t}") for t in TASKS)):
        path = tmp_path / name
        shutil.copytree(MODELS / name, path)
        tokenizer = json.loads((path / "tokenizer.json").read_text())
        tokenizer["model"]["vocab"]["1"] = 500
        (path / "tokenizer.json").write_text(json.dumps(tokenizer))
        overrides.append(f"{key}.model={path}")
    problems = found(*overrides)
    assert {problem.key for problem in problems} == {"data.train", "data.eval"}
    assert all("with token 500" in problem.message for problem in problems)


def test_a_student_that_names_no_end_of_sequence_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "student"
    shutil.copytree(MODELS / "student", path)
    for name in ("config.json", "generation_config.json"):
        content = json.loads((path / name).read_text()) | {"eos_token_id": None}
        (path / name).write_text(json.dumps(content))
    assert "eos_token_id" in one(f"student.model={path}").message


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "student"
    shutil.copytree(MODELS / "student", path)
    (path / "model.safetensors").unlink()
    assert "no *.safetensors" in one(f"student.model={path}").message


def test_more_gpus_than_there_are_are_refused_with_the_sum() -> None:
    problem = one("cluster.device=cuda", "rollout.replicas=2", gpus=4)
    assert "take 5 GPUs" in problem.message
    assert "this machine has 4" in problem.message


def test_enough_gpus_are_taken() -> None:
    assert found("cluster.device=cuda", gpus=4) == []


def test_visible_gpus_are_those_the_environment_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert gpu_count() == 2


def test_a_head_size_without_a_cpu_kernel_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "student"
    shutil.copytree(MODELS / "student", path)
    content = json.loads((path / "config.json").read_text()) | {"head_dim": 48}
    (path / "config.json").write_text(json.dumps(content))
    assert "head size 48" in one(f"student.model={path}").message


def test_a_top_k_above_the_vocabulary_is_refused() -> None:
    assert one("loss.top_k=129").key == "loss.top_k"


def changed(name: str, target: Path, **settings: Any) -> Path:
    """A copy of a model with other settings in its config.json."""
    shutil.copytree(MODELS / name, target)
    content = json.loads((target / "config.json").read_text()) | settings
    (target / "config.json").write_text(json.dumps(content))
    return target


def test_a_top_k_above_a_teachers_vocabulary_is_refused(tmp_path: Path) -> None:
    smaller = changed("teacher-sort", tmp_path / "teacher", vocab_size=100)
    problems = found("loss.top_k=101", f"teachers.sort.model={smaller}")
    assert ("loss.top_k", "at most 100") in {(p.key, p.remedy) for p in problems}


def problems(support: str, *overrides: str) -> list[Problem]:
    """Of a divergence over a support, without those that say it is not built yet."""
    base = config(*overrides)
    loss = base.loss.model_copy(update={"support": support})
    return preflight(base.model_copy(update={"loss": loss}), "c.yaml", 0).problems


@pytest.mark.parametrize("support", ["student_topk", "full_vocab"])
def test_teachers_whose_head_can_be_loaded_are_taken(support: str) -> None:
    assert problems(support) == []


def test_every_teacher_whose_logits_take_another_path_is_named(tmp_path: Path) -> None:
    models = [
        f"teachers.{name}.model={changed(f'teacher-{name}', tmp_path / name, dim_model_base=64)}"
        for name in ("sort", "reverse")
    ]
    keys = [problem.key for problem in problems("full_vocab", *models)]
    assert keys == ["teachers.sort.model", "teachers.reverse.model"]


@pytest.mark.parametrize("support", ["teacher_topk", "student_topk"])
def test_a_teacher_whose_engine_has_the_head_may_compute_logits_its_own_way(
    tmp_path: Path, support: str
) -> None:
    path = changed("teacher-sort", tmp_path / "teacher", dim_model_base=64)
    assert problems(support, f"teachers.sort.model={path}") == []


def test_the_students_top_k_needs_the_whole_nucleus() -> None:
    (problem,) = problems("student_topk", "rollout.top_p=0.9")
    assert problem.key == "rollout.top_p"


def with_reward(grader: str, *overrides: str) -> list[Problem]:
    graded = config(*overrides).model_copy(update={"reward": RewardConfig(grader=grader)})
    return preflight(graded, "c.yaml", 0).problems


def test_the_rewards_grader_is_checked_as_the_evaluations() -> None:
    (problem,) = with_reward("no_such_module:grade")
    assert problem.key == "reward.grader"


def test_rows_that_the_reward_cannot_grade_are_refused(tmp_path: Path) -> None:
    (problem,) = with_reward("exact", rows(tmp_path, *GOOD))
    assert problem.key == "data.train"
    assert "2 rows have no 'answer'" in problem.message


def test_a_grader_that_cannot_be_imported_is_refused() -> None:
    assert one("eval.grader=no_such_module:grade").key == "eval.grader"


def broken_student(tmp_path: Path, name: str, text: str) -> str:
    path = tmp_path / "student"
    shutil.copytree(MODELS / "student", path)
    (path / name).write_text(text)
    return f"student.model={path}"


@pytest.mark.parametrize(
    ("name", "text"), [("config.json", "{"), ("tokenizer.json", "{}"), ("tokenizer.json", "{")]
)
def test_a_broken_model_file_is_a_problem(tmp_path: Path, name: str, text: str) -> None:
    problem = one(broken_student(tmp_path, name, text))
    assert (problem.key, problem.remedy) == ("student.model", "save the model again")


def test_a_head_size_of_null_is_read_from_the_other_sizes(tmp_path: Path) -> None:
    content = json.loads((MODELS / "student" / "config.json").read_text()) | {"head_dim": None}
    assert found(broken_student(tmp_path, "config.json", json.dumps(content))) == []


def test_a_chat_template_that_is_none_is_a_problem(tmp_path: Path) -> None:
    problems = found(broken_student(tmp_path, "chat_template.jinja", "{% if %}"))
    assert {problem.key for problem in problems} == {"data.train", "data.eval"}


@pytest.mark.parametrize("code", ["def f(:", "x = 1 / 0"])
def test_a_grader_module_that_cannot_be_imported_is_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    (tmp_path / f"grader{len(code)}.py").write_text(code)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert one(f"eval.grader=grader{len(code)}:f").key == "eval.grader"


def test_a_model_path_beyond_all_measure_is_a_problem() -> None:
    assert one(f"student.model=/{'x' * 5000}").key == "student.model"


def test_evaluation_responses_must_fit_too() -> None:
    problem = one("eval.max_tokens=127")
    assert (problem.key, problem.remedy) == ("eval.max_tokens", "lower it")


def test_a_missing_file_blames_no_teacher() -> None:
    (problem,) = found("data.train=[/no/such.jsonl]")
    assert problem.remedy == "check the path"


def test_everything_is_reported_together(tmp_path: Path) -> None:
    keys = [
        problem.key
        for problem in found(
            "loss.top_k=129",
            "eval.grader=nonsense",
            "teachers.sort.model=/no/such",
            "cluster.device=cuda",
            rows(tmp_path, *GOOD, {"prompt": "x", "data_source": "add"}),
            gpus=1,
        )
    ]
    assert set(keys) == {
        "loss.top_k", "eval.grader", "teachers.sort.model", "cluster", "teachers",
    }  # fmt: skip


def test_rows_are_handed_on_to_the_run() -> None:
    inputs = preflight(config(), "c.yaml", 0)
    assert (len(inputs.train[0]), len(inputs.eval)) == (6000, 512)
