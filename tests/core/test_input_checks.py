"""Preflight checks between files: answers to grade, ends of responses, shards of weights."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer

from async_opd.core.errors import Problem
from async_opd.core.load import load_config
from async_opd.core.preflight import preflight
from async_opd.core.text import Text

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
MODELS = EXAMPLE.parent / "quickstart" / "models"


def found(*overrides: str) -> list[Problem]:
    return preflight(load_config(EXAMPLE, overrides), "c.yaml", 0).problems


def model(tmp_path: Path, name: str) -> Path:
    path = tmp_path / name
    shutil.copytree(MODELS / name, path)
    return path


def set_eos(path: Path, *ids: int) -> None:
    file = path / "generation_config.json"
    content = json.loads(file.read_text()) | {"eos_token_id": list(ids)}
    file.write_text(json.dumps(content))


def unanswered(tmp_path: Path) -> str:
    file = tmp_path / "eval.jsonl"
    file.write_text('{"prompt": "sort 1=", "data_source": "sort"}\n')
    return f"data.eval=[{file}]"


def test_evaluation_rows_without_an_answer_are_refused(tmp_path: Path) -> None:
    (problem,) = found(unanswered(tmp_path))
    assert (problem.key, "data.answer" in problem.remedy) == ("data.eval", True)


def test_a_users_own_grader_may_need_no_answer(tmp_path: Path) -> None:
    assert found(unanswered(tmp_path), "eval.grader=math:sqrt") == []


def test_a_teacher_that_ends_responses_otherwise_is_refused(tmp_path: Path) -> None:
    path = model(tmp_path, "teacher-sort")
    set_eos(path, 5)
    (problem,) = found(f"teachers.sort.model={path}")
    assert (problem.key, "never to stop" in problem.message) == ("teachers.sort.model", True)


def test_a_teacher_with_one_more_end_of_sequence_is_taken(tmp_path: Path) -> None:
    path = model(tmp_path, "teacher-sort")
    set_eos(path, 2, 5)
    assert found(f"teachers.sort.model={path}") == []


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    path = model(tmp_path, "student")
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (problem,) = found(f"student.model={path}")
    assert "model-2.safetensors" in problem.message


def test_padding_and_truncation_stored_in_the_tokenizer_do_not_apply(tmp_path: Path) -> None:
    path = model(tmp_path, "student")
    expected = Text(path).encode("sort 493021=")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=40)
    tokenizer.save(str(path / "tokenizer.json"))
    assert Text(path).encode("sort 493021=") == expected
