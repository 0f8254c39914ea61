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

EXAMPLE = Path(__file__).parents[3] / "examples" / "quickstart.yaml"
SERVER: dict[str, Any] = {
    "kind": "endpoint",
    "urls": ["http://one:8000"],
    "served_model": "sorter",
}


def load(teacher: dict[str, Any], *overrides: str) -> RunConfig:
    return load_config(EXAMPLE, [f"teachers.sort={json.dumps(teacher)}", *overrides])


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


def test_a_config_with_a_server_loads_again_to_an_equal_one(tmp_path: Path) -> None:
    config = load(SERVER | {"api_key_env": "HOME", "allow_http_key": True})
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config


def test_an_unknown_kind_is_told_with_the_nearest() -> None:
    (problem,) = problems({"kind": "endpont"})
    assert (problem.key, problem.remedy) == ("teachers.sort.kind", "did you mean endpoint?")


def test_keys_of_another_kind_are_refused() -> None:
    (problem,) = problems(SERVER | {"replicas": 2})
    assert problem.key == "teachers.sort.replicas"


def test_zero_replicas_are_refused() -> None:
    found = problems({"model": "m", "replicas": 0})
    assert [problem.key for problem in found] == ["teachers.sort.replicas"]


def test_a_server_needs_a_url() -> None:
    assert [p.key for p in problems(SERVER | {"urls": []})] == ["teachers.sort.urls"]


def test_a_url_may_end_in_v1() -> None:
    teacher = load(SERVER | {"urls": ["http://one:8000/v1/", "https://two/"]}).teachers["sort"]
    assert isinstance(teacher, EndpointTeacher)
    assert teacher.urls == ["http://one:8000", "https://two"]


@pytest.mark.parametrize(
    "urls", [["one:8000"], ["ftp://one"], ["http://"], ["http://one", "http://one/"]]
)
def test_what_is_no_list_of_servers_is_refused(urls: list[str]) -> None:
    assert [p.key for p in problems(SERVER | {"urls": urls})] == ["teachers.sort.urls"]


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


def test_a_key_that_the_environment_lacks_is_told() -> None:
    (problem,) = problems(SERVER | {"api_key_env": "NO_SUCH_VARIABLE_HERE", "allow_http_key": True})
    assert "NO_SUCH_VARIABLE_HERE" in problem.message


@pytest.mark.parametrize("support", ["student_topk", "full_vocab"])
def test_what_no_server_returns_is_refused_with_the_reason(support: str) -> None:
    (problem,) = problems(SERVER, f"loss={{kind: reverse_kl, support: {support}}}")
    assert problem.key == "teachers.sort.kind"
    assert "no server returns" in problem.message


def test_a_server_scores_at_temperature_1_only() -> None:
    (problem,) = problems(SERVER | {"temperature": 2.0})
    assert problem.key == "teachers.sort.temperature"
    assert "kind: vllm" in problem.message
    assert not problems(SERVER | {"temperature": 1})


@pytest.mark.parametrize("temperature", [0, -1, 1e-9, 1e9, ".inf"])
def test_a_temperature_that_leaves_nothing_of_the_teacher_is_refused(temperature: Any) -> None:
    (problem,) = problems({"model": "m", "temperature": temperature})
    assert problem.key == "teachers.sort.temperature"


def test_a_server_takes_no_gpu_of_the_run() -> None:
    (pool,) = [pool for pool in pools(load(SERVER)) if pool.name == "teachers.sort"]
    assert (pool.gpus, pool.model) == (0, "sorter")


def test_a_servers_model_directory_is_compared_with_the_student(tmp_path: Path) -> None:
    found = problems(SERVER | {"model": str(tmp_path)})
    assert [problem.key for problem in found] == ["teachers.sort.model"]


SELF: dict[str, Any] = {"kind": "self"}


def test_a_teacher_can_be_the_student_itself() -> None:
    config = load(SELF)
    assert isinstance(config.teachers["sort"], SelfTeacher)
    assert config.teacher_model("sort") == config.student.model
    assert problems(SELF) == []


def test_the_student_as_teacher_has_no_model_of_its_own() -> None:
    assert [problem.key for problem in problems(SELF | {"model": "m"})] == ["teachers.sort.model"]


def test_a_refreshed_teacher_whose_head_is_in_the_trainer_is_refused() -> None:
    loss = "loss={kind: forward_kl, support: full_vocab}"
    assert problems(SELF, loss) == []
    (problem,) = problems(SELF | {"refresh_every": 2}, loss)
    assert problem.key == "teachers.sort.refresh_every"


def test_a_template_needs_a_field() -> None:
    found = problems(SELF | {"prompt_template": "sort 1="})
    assert [problem.key for problem in found] == ["teachers.sort.prompt_template"]


def test_a_template_with_a_field_that_rows_lack_is_refused() -> None:
    (problem,) = problems(SELF | {"prompt_template": "{solution}"})[:1]
    assert "'solution'" in problem.message


def test_a_prompt_that_is_too_long_for_the_teacher_only_is_refused() -> None:
    template = "sort {answer}=" * 20
    assert problems(SELF | {"prompt_template": template})


# ── placement ──────────────────────────────────────────────────────────────────────────────────

COLOCATED = {"placement": "colocated", "with": "rollout"}
MODEL = str(EXAMPLE.parent / "quickstart" / "models" / "teacher-sort")


def vllm(**others: Any) -> dict[str, Any]:
    return {"model": MODEL, **COLOCATED, **others}


def test_a_colocated_teacher_takes_no_gpu_of_its_own() -> None:
    (pool,) = [pool for pool in pools(load(vllm())) if pool.name == "teachers.sort"]
    assert (pool.gpus, pool.shares, pool.term) == (0, "rollout", "teachers.sort 0 (on rollout's)")


def test_gpus_that_are_shared_are_counted_once() -> None:
    gpus = "cluster.device=cuda"
    other = "teachers.reverse.placement=colocated", "teachers.reverse.with=train"
    config = load(vllm(), gpus, *other)
    assert preflight(config, "c.yaml", 2).problems == []
    (problem,) = preflight(config, "c.yaml", 1).problems
    assert "take 2 GPUs (rollout 1·1 + teachers.sort 0 (on rollout's)" in problem.message


def test_a_colocated_teacher_says_with_whom(tmp_path: Path) -> None:
    assert [p.key for p in problems({"model": MODEL, "placement": "colocated"})] == [
        "teachers.sort"
    ]
    assert [p.key for p in problems({"model": MODEL, "with": "train"})] == ["teachers.sort"]
    config = load(vllm())
    (tmp_path / "c.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "c.yaml") == config


def test_more_replicas_than_hosts_are_refused_with_both_numbers() -> None:
    (problem,) = problems(vllm(replicas=3), "rollout.replicas=2")
    assert problem.key == "teachers.sort.replicas"
    assert "found 3, but rollout has 2" in problem.message


@pytest.mark.parametrize(
    ("teacher", "host", "key", "words"),
    [
        ({"tensor_parallel": 3}, {"tensor_parallel": 2}, "tensor_parallel", "several 2 of rollout"),
        ({"tensor_parallel": 4}, {"replicas": 3}, "tensor_parallel", "rollout has 3 GPUs to share"),
        (
            {"tensor_parallel": 2, "replicas": 2},
            {"replicas": 3},
            "replicas",
            "rollout has 3 to share GPUs with, 2 for each replica",
        ),
    ],
)
def test_gpus_that_the_hosts_do_not_have_are_refused(
    teacher: dict[str, int], host: dict[str, int], key: str, words: str
) -> None:
    (problem,) = problems(vllm(**teacher), *(f"rollout.{name}={host[name]}" for name in host))
    assert problem.key == f"teachers.sort.{key}"
    assert words in problem.message


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


def test_a_refreshed_teacher_cannot_be_colocated() -> None:
    (problem,) = problems(SELF | COLOCATED | {"refresh_every": 1})
    assert problem.key == "teachers.sort.refresh_every"


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
