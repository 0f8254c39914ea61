"""Kinds of teacher: told apart by ``kind``, each with its own keys, secrets not shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from async_opd.checks.preflight import preflight
from async_opd.checks.resources import hosts_of, misplaced, pools
from async_opd.config.load import dump_config, load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EndpointTeacher, SelfTeacher, VllmTeacher
from async_opd.core.errors import ConfigError, Problem
from tests.checks.inputs import EXAMPLE, FEW, MODELS

SERVER: dict[str, Any] = {
    "kind": "endpoint",
    "urls": ["http://one:8000"],
    "served_model": "sorter",
}


SELF: dict[str, Any] = {"kind": "self"}
COLOCATED = {"placement": "colocated", "with": "rollout"}
MODEL = str(MODELS / "teacher-sort")
FULL = "loss={kind: forward_kl, support: full_vocab}"


def vllm(**others: Any) -> dict[str, Any]:
    return {"model": MODEL, **COLOCATED, **others}


def load(teacher: dict[str, Any], *overrides: str) -> RunConfig:
    return load_config(EXAMPLE, [*FEW, f"teachers.sort={json.dumps(teacher)}", *overrides])


def problems(teacher: dict[str, Any], *overrides: str) -> list[Problem]:
    try:
        return preflight(load(teacher, *overrides), "c.yaml", 0).problems
    except ConfigError as error:
        return error.problems


def test_a_teacher_without_a_kind_is_an_engine_of_the_runs_own() -> None:
    assert isinstance(load_config(EXAMPLE).teachers["sort"], VllmTeacher)


def test_a_server_is_a_teacher() -> None:
    teacher = load(SERVER).teachers["sort"]
    assert isinstance(teacher, EndpointTeacher)
    assert (teacher.replicas, teacher.gpus) == (1, 0)


@pytest.mark.parametrize(
    ("teacher", "overrides", "key", "words"),
    [
        ({"kind": "endpont"}, [], "kind", "did you mean endpoint?"),
        ({"model": "m", "replicas": 0}, [], "replicas", "a number from 1 on"),
        *(
            ({"model": "m", "temperature": one}, [], "temperature", "found")
            for one in (0, -1, 1e-9, 1e9, ".inf")
        ),
        (SERVER | {"replicas": 2}, [], "replicas", "unknown key"),
        *(
            (SERVER | {"urls": urls}, [], "urls", "found")
            for urls in ([], ["one:8000"], ["ftp://one"], ["http://"], ["http://a", "http://a/"])
        ),
        (SERVER | {"api_key_env": "NOT_SET", "allow_http_key": True}, [], "api_key_env", "NOT_SET"),
        (SERVER, ["loss={kind: reverse_kl, support: student_topk}"], "kind", "no server returns"),
        (SERVER, [FULL], "kind", "no server returns"),
        (SERVER | {"temperature": 2.0}, [], "temperature", "kind: vllm"),
        (SERVER | {"model": "/"}, [], "model", "/"),
        (SELF | {"model": "m"}, [], "model", "unknown key"),
        (SELF | {"prompt_template": "sort 1="}, [], "prompt_template", "field"),
        (SELF | {"refresh_every": 2}, [FULL], "refresh_every", "full_vocab"),
        (SELF | COLOCATED | {"refresh_every": 1}, [], "refresh_every", "colocated"),
        ({"model": MODEL, "placement": "colocated"}, [], "", "with"),
        ({"model": MODEL, "with": "train"}, [], "", "placement"),
        (vllm(replicas=3), ["rollout.replicas=2"], "replicas", "found 3, but rollout has 2"),
        (
            vllm(tensor_parallel=3),
            ["rollout.tensor_parallel=2"],
            "tensor_parallel",
            "several 2 of rollout",
        ),
        (
            vllm(tensor_parallel=4),
            ["rollout.replicas=3"],
            "tensor_parallel",
            "rollout has 3 GPUs to share",
        ),
        (
            vllm(tensor_parallel=2, replicas=2),
            ["rollout.replicas=3"],
            "replicas",
            "rollout has 3 to share GPUs with, 2 for each replica",
        ),
    ],
)
def test_what_no_teacher_can_be_is_one_problem_with_its_key_and_its_cause(
    teacher: dict[str, Any], overrides: list[str], key: str, words: str
) -> None:
    (problem,) = problems(teacher, *overrides)
    assert problem.key == f"teachers.sort.{key}".removesuffix(".")
    assert words in str(problem)


@pytest.mark.parametrize(
    ("teacher", "overrides"), [(SERVER | {"temperature": 1}, []), (SELF, []), (SELF, [FULL])]
)
def test_a_teacher_as_it_may_be_has_no_problem(
    teacher: dict[str, Any], overrides: list[str]
) -> None:
    assert problems(teacher, *overrides) == []


@pytest.mark.parametrize(
    "teacher", [SERVER | {"api_key_env": "HOME", "allow_http_key": True}, vllm()]
)
def test_a_config_with_a_teacher_loads_again_to_an_equal_one(
    teacher: dict[str, Any], tmp_path: Path
) -> None:
    config = load(teacher)
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config


def test_a_url_may_end_in_v1() -> None:
    teacher = load(SERVER | {"urls": ["http://one:8000/v1/", "https://two/"]}).teachers["sort"]
    assert isinstance(teacher, EndpointTeacher)
    assert teacher.urls == ["http://one:8000", "https://two"]


@pytest.mark.parametrize(
    "extra",
    [
        {"api_key_env": "sk-secret"},
        {"api_key": "sk-secret"},
        {"urls": ["http://me:sk-secret@one"]},
    ],
)
def test_a_key_in_the_wrong_place_is_refused_and_not_shown(extra: dict[str, Any]) -> None:
    found = problems(SERVER | extra)
    assert found
    assert "sk-secret" not in str(ConfigError(found))


def test_a_server_takes_no_gpu_of_the_run() -> None:
    (pool,) = [pool for pool in pools(load(SERVER)) if pool.name == "teachers.sort"]
    assert (pool.gpus, pool.model) == (0, "sorter")


def test_a_teacher_can_be_the_student_itself() -> None:
    config = load(SELF)
    assert isinstance(config.teachers["sort"], SelfTeacher)
    assert config.teacher_model("sort") == config.student.model
    assert problems(SELF) == []


def test_a_template_with_a_field_that_rows_lack_is_refused() -> None:
    (problem,) = problems(SELF | {"prompt_template": "{solution}"})[:1]
    assert "'solution'" in problem.message


def test_a_prompt_that_is_too_long_for_the_teacher_only_is_refused() -> None:
    template = "sort {answer}=" * 20
    assert problems(SELF | {"prompt_template": template})


def test_a_colocated_teacher_takes_no_gpu_of_its_own() -> None:
    (pool,) = [pool for pool in pools(load(vllm())) if pool.name == "teachers.sort"]
    assert (pool.gpus, pool.shares, pool.term) == (0, "rollout", "teachers.sort 0 (on rollout's)")


@pytest.mark.usefixtures("torch_for_gpus")
def test_gpus_that_are_shared_are_counted_once() -> None:
    gpus = "cluster.device=cuda"
    other = "teachers.reverse.placement=colocated", "teachers.reverse.with=train"
    config = load(vllm(), gpus, *other)
    assert preflight(config, "c.yaml", 2).problems == []
    (problem,) = preflight(config, "c.yaml", 1).problems
    assert "take 2 GPUs (rollout 1·1 + teachers.sort 0 (on rollout's)" in problem.message


@pytest.mark.parametrize(
    ("tensor_parallel", "each", "hosts"),
    [
        (2, 2, [range(1), range(1, 2)]),
        (1, 2, [range(1), range(1, 2)]),
        (4, 2, [range(2), range(2, 4)]),
    ],
)
def test_a_replica_shares_the_gpus_of_as_many_hosts_as_have_those_that_it_needs(
    tensor_parallel: int, each: int, hosts: list[range]
) -> None:
    sizes = f"rollout.tensor_parallel={each}", "rollout.replicas=4"
    config = load(vllm(tensor_parallel=tensor_parallel, replicas=2), *sizes)
    assert hosts_of(config, "teachers.sort") == hosts
    assert list(misplaced(config)) == []


def both(weight: object, *overrides: str) -> list[Problem]:
    weights = (f"teachers.{name}.weight={weight}" for name in ("sort", "reverse"))
    try:
        load_config(EXAMPLE, [*weights, *overrides])
    except ConfigError as error:
        return error.problems
    return []


def test_weights_are_automatic_for_all_teachers_or_for_none() -> None:
    assert both("auto") == []
    (problem,) = both("auto", "teachers.reverse.weight=2")
    assert problem.key == "teachers.sort.weight"
    assert "a number for reverse" in problem.message


def test_automatic_weights_need_a_distillation_loss() -> None:
    (problem,) = both("auto", "loss.weight=0", "reward={}")
    assert (problem.key, "loss.weight is 0" in problem.message) == ("teachers.sort.weight", True)


def test_the_only_teacher_has_nothing_to_be_balanced_with(tmp_path: Path) -> None:
    tree = yaml.safe_load(EXAMPLE.read_text())
    tree["teachers"] = {"sort": tree["teachers"]["sort"] | {"weight": "auto"}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError) as error:
        load_config(tmp_path / "c.yaml")
    (problem,) = error.value.problems
    assert "the only teacher" in problem.message


@pytest.mark.parametrize("weight", ["0", "-1", "automatic"])
def test_another_weight_is_refused(weight: str) -> None:
    assert {problem.key.split(".")[1] for problem in both(weight)} == {"sort", "reverse"}
