"""A response runs no code in a verifier of reasoning_gym unless the config allows it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS

from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.data import DataConfig
from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.row import Row
from async_opd.data.reasoning_gym import ReasoningGymSource
from async_opd.data.stored_rows import read_source
from async_opd.grading.grader_pool import Graders, GraderSpec
from async_opd.grading.graders import SAFE_TASKS, GradeError
from tests.security.evaluating import evaluations

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
EVALUATE = [
    "binary_matrix",
    "countdown",
    "intermediate_integration",
    "n_queens",
    "polynomial_multiplication",
    "puzzle24",
    "simple_integration",
    "spiral_matrix",
    "string_insertion",
]
READ = {
    "bitwise_arithmetic": {"eval(problem)"},  # the task's own problem
    "codeio": {  # makes the task, from the package's data
        "gzip.open(self._data_path, 'rt', encoding='utf-8')",
        "exec(full_code, local_vars, local_vars)",
    },
    "figlet_font": {"get_data_file_path('anagrams.jsonl').open()"},
    "group_anagrams": {"get_data_file_path('anagrams.jsonl').open()"},
    "number_sorting": {"eval(entry['answer'])"},  # the task's own answer
    "propositional_logic": {  # of its own Expression, which is followed
        "self.left.simplify()",
        "self.right.simplify()",
        "Expression(Operator.OR, Expression(Operator.NOT, simplified_left), "
        "simplified_right).simplify()",
    },
    "rush_hour": {"data_path.open()"},
    "word_ladder": {"get_data_file_path('words.csv').open('r', encoding='utf-8')"},
}
"""Calls that do not see the response, read one by one."""


def made(task: str) -> Row:
    source = ReasoningGymSource(kind="reasoning_gym", task=task, size=1)
    return read_source(source, 0, DataConfig(train=[]))[0]


def grade(response: str, row: Row, allow_eval: bool) -> float:
    async def once() -> float:
        limits = GradingConfig(timeout_s=120, processes=1, allow_eval=allow_eval)
        spec = GraderSpec("exact", limits, 120)
        graders = Graders(spec)
        try:
            return await graders.grade(response, row)
        finally:
            graders.close()

    return asyncio.run(once())


def with_task(task: str, *overrides: str) -> RunConfig:
    source = f"{{kind: reasoning_gym, task: {task}, size: 2}}"
    return load_config(EXAMPLE, [f"data.eval=[{source}]", *overrides])


def refusals(config: RunConfig) -> list[str]:
    problems = preflight(config, "here", gpus=0).problems
    return [f"{p.key}: {p.message}; {p.remedy}" for p in problems if "evaluate" in p.message]


def test_the_verifiers_that_count_as_safe_are_those_that_evaluate_no_response() -> None:
    found = {
        task for task, (kind, _) in DATASETS.items() if evaluations(kind) <= READ.get(task, set())
    }
    assert set(SAFE_TASKS) == found
    assert sorted(DATASETS.keys() - found) == sorted([*EVALUATE, "composite"])


@pytest.mark.parametrize("task", EVALUATE)
def test_a_response_runs_no_code_in_a_verifier(task: str, tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    with pytest.raises(GradeError, match=f"(?s)verifier of {task} would run.*grading.allow_eval"):
        grade(f"__import__('os').mkdir({str(ran)!r})", made(task), allow_eval=False)
    assert not ran.exists()


@pytest.mark.slow
def test_a_response_does_run_code_where_that_is_allowed(tmp_path: Path) -> None:
    """The documented meaning of the key; if this fails the package has changed."""
    ran = tmp_path / "ran"
    grade(f"__import__('os').mkdir({str(ran)!r})", made("string_insertion"), allow_eval=True)
    assert ran.exists()


@pytest.mark.slow
def test_a_verifier_that_only_reads_grades_as_ever() -> None:
    row = made("basic_arithmetic")
    assert grade(str(row.answer), row, allow_eval=False) == 1.0


def test_check_refuses_a_verifier_that_evaluates_and_names_it_and_the_key() -> None:
    (said,) = refusals(with_task("puzzle24"))
    assert said.startswith("data.eval: ")
    assert "puzzle24" in said
    assert "allow_eval" in said


def test_check_refuses_it_for_a_reward_too() -> None:
    source = "[{kind: reasoning_gym, task: countdown, size: 2}]"
    config = load_config(EXAMPLE, [f"data.train={source}", "reward={grader: exact}"])
    assert [said[:10] for said in refusals(config)] == ["data.train"]


def test_check_allows_it_where_the_config_does_and_where_nothing_is_graded() -> None:
    assert refusals(with_task("puzzle24", "grading.allow_eval=true")) == []
    source = "[{kind: reasoning_gym, task: countdown, size: 2}]"
    assert refusals(load_config(EXAMPLE, [f"data.train={source}", "reward=null"])) == []


def test_the_config_reaches_the_graders() -> None:
    assert not GraderSpec.of(with_task("puzzle24"), "exact").limits.allow_eval
    assert GraderSpec.of(
        with_task("puzzle24", "grading.allow_eval=true"), "exact"
    ).limits.allow_eval
