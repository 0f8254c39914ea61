"""Loading: nothing hides another problem, and nothing odd is taken in silence."""

from __future__ import annotations

from pathlib import Path

import pytest

from async_opd.config.keys import REMOVED, RENAMED, default_of, keys_below
from async_opd.config.load import dump_config, load_config, load_recorded_config
from async_opd.config.run_config import RunConfig
from async_opd.config.yaml_text import dump_yaml, load_yaml
from async_opd.core.errors import ConfigError, Problem

MINIMAL = "student: {model: s}\nteachers: {a: {model: t}}\ndata: {train: a.jsonl}\n"


def load(tmp_path: Path, extra: str = "", *overrides: str) -> RunConfig:
    (tmp_path / "c.yaml").write_text(MINIMAL + extra)
    return load_config(tmp_path / "c.yaml", overrides)


def problems(tmp_path: Path, extra: str = "", *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, extra, *overrides)
    return caught.value.problems


def test_a_supervised_k1_hides_no_other_problem_of_the_loss(tmp_path: Path) -> None:
    found = problems(tmp_path, "loss: {kind: k1, gradient: supervised, clamp: -1}")
    assert [p.key for p in found] == ["loss.gradient", "loss.clamp"]


def test_sizes_that_do_not_fit_are_told_one_by_one(tmp_path: Path) -> None:
    found = problems(tmp_path, "train: {batch_size: 6}\nqueue: {max_samples: 2}")
    assert [p.key for p in found] == ["train.batch_size", "queue.max_samples"]


UNEVALUATED = "eval: {every: 0}\ncheckpoint: {keep_best: eval/a/accuracy}"


def test_a_best_checkpoint_needs_evaluations_while_training(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, UNEVALUATED, "data.eval=b.jsonl")
    assert (problem.key, "eval.every is 0" in problem.message) == ("checkpoint.keep_best", True)


def test_a_best_checkpoint_needs_rows_to_evaluate_on(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "checkpoint: {keep_best: eval/a/accuracy}")
    assert (problem.key, "data.eval" in problem.message) == ("checkpoint.keep_best", True)


def test_several_greedy_answers_to_a_prompt_are_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "eval: {n: 4}")
    assert "with temperature 0 all answers to a prompt are the same" in problem.message
    assert load(tmp_path, "eval: {n: 4, temperature: 0.7}").eval.n == 4


def test_a_rollback_needs_checkpoints(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "guardrail: {mode: roll_back}\ncheckpoint: {every: 0}")
    assert problem.key == "guardrail.mode"


def test_a_rollback_needs_restarts_of_the_trainer(tmp_path: Path) -> None:
    sections = "guardrail: {mode: roll_back}\nsupervision: {max_restarts: 0}"
    assert problems(tmp_path, sections)[0].key == "guardrail.mode"


def test_adapters_are_not_merged_into_offloaded_parameters(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "train: {lora: {rank: 8}, offload: parameters}")
    assert problem.key == "train.offload"


def test_parameters_are_not_offloaded_twice(tmp_path: Path) -> None:
    shared = "rollout: {placement: colocated, with: train}\ntrain: {offload: parameters}"
    assert "train.offload" in [problem.key for problem in problems(tmp_path, shared)]


def test_broken_yaml_is_told_with_its_line(tmp_path: Path) -> None:
    assert problems(tmp_path, "name: [x")[0].where.startswith(f"{tmp_path}/c.yaml:")


def test_an_override_that_is_no_yaml_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "", "teachers.a.sources=[x")
    assert (problem.where, problem.key) == ("command line", "teachers.a.sources")


def test_a_key_missing_below_an_override_blames_the_command_line(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "", "teachers.b.replicas=2")
    assert (problem.where, problem.key) == ("command line", "teachers.b.model")


def test_an_infinite_number_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, "train: {lr: .inf}")[0].key == "train.lr"


def test_an_empty_model_is_refused(tmp_path: Path) -> None:
    assert problems(tmp_path, "", "student.model=''")[0].key == "student.model"


def test_the_python_name_of_a_key_is_no_key(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "async_: {sync_steps: 3}")
    assert problem.remedy == "did you mean async?"


def test_a_key_of_another_section_is_found(tmp_path: Path) -> None:
    assert problems(tmp_path, "batch_size: 8")[0].remedy == "did you mean train.batch_size?"


@pytest.mark.parametrize(
    "name", ["max_logprobs", "logprobs-mode", "worker_extension_cls", "enable_lora"]
)
def test_an_argument_that_every_replica_sets_itself_is_refused(tmp_path: Path, name: str) -> None:
    (problem,) = problems(tmp_path, f"rollout: {{engine: {{extra: {{{name}: 1}}}}}}")
    assert problem.key == "rollout.engine.extra"
    assert "need the run's own" in problem.message


@pytest.mark.parametrize(
    "name", ["pipeline-parallel-size", "data_parallel_size", "distributed_executor_backend"]
)
def test_an_argument_that_changes_an_engines_gpus_is_refused(tmp_path: Path, name: str) -> None:
    (problem,) = problems(tmp_path, f"rollout: {{engine: {{extra: {{{name}: 2}}}}}}")
    assert problem.key == "rollout.engine.extra"
    assert "changes the GPUs or the executor of an engine" in problem.message


def test_a_hub_id_stays_as_it_is(tmp_path: Path) -> None:
    assert load(tmp_path, "", "student.model=org/name").student.model == "org/name"


def test_a_model_folder_beside_the_file_becomes_absolute(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    assert load(tmp_path).student.model == str(tmp_path / "s")


def test_the_run_directory_stays_relative_to_the_working_directory(tmp_path: Path) -> None:
    assert load(tmp_path, "", "run_dir=runs/x").run_dir == "runs/x"


@pytest.mark.parametrize("name", ["1e5", "null", "2020-01-01", "a: b", "é\u2028x", "="])
def test_a_name_of_any_look_survives_writing(tmp_path: Path, name: str) -> None:
    config = load(tmp_path).model_copy(update={"name": name})
    (tmp_path / "again.yaml").write_text(dump_config(config), encoding="utf-8")
    assert load_config(tmp_path / "again.yaml", recorded=True) == config


@pytest.mark.parametrize("value", ["256", "0"])
@pytest.mark.parametrize("kind", ["model: t", "kind: self", "kind: endpoint, urls: [http://a]"])
def test_a_removed_key_is_answered_with_the_reason_and_the_remedy(
    tmp_path: Path, kind: str, value: str
) -> None:
    served = ", served_model: m" if "endpoint" in kind else ""
    extra = f"teachers: {{a: {{{kind}{served}, early_tokens: {value}}}}}\n"
    (tmp_path / "c.yaml").write_text("student: {model: s}\ndata: {train: a.jsonl}\n" + extra)
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "c.yaml")
    (problem,) = caught.value.problems
    assert (problem.where, problem.key) == (str(tmp_path / "c.yaml"), "teachers.a.early_tokens")
    assert f"found {value}: scoring while the student decodes was removed" in problem.message
    assert "docs/adr/0008" in problem.message
    assert problem.remedy == "delete the key"


def test_a_removed_key_is_answered_on_the_command_line_too(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "", "teachers.a.early_tokens=256")
    assert (problem.where, problem.key) == ("command line", "teachers.a.early_tokens")
    assert "was removed" in problem.message


WITH_DEFAULTS = [key.replace("*", "a") for key, one in REMOVED.items() if one.default is not None]


def saved(tmp_path: Path, change: float = 0) -> tuple[RunConfig, Path]:
    """A config, and its file of an earlier version with the removed keys, by default as they were.

    Their defaults are numbers, to which ``change`` is added.
    """
    config = load(tmp_path, "train: {lora: {rank: 8}}")
    tree = load_yaml(dump_config(config))
    for key, one in REMOVED.items():
        if one.default is not None:
            *outer, name = key.replace("*", "a").split(".")
            section = tree
            for part in outer:
                section = section[part]
            section[name] = one.default + change
    (tmp_path / "saved.yaml").write_text(dump_yaml(tree))
    return config, tmp_path / "saved.yaml"


def test_a_saved_config_with_the_defaults_of_removed_keys_is_that_without_them(
    tmp_path: Path,
) -> None:
    config, file = saved(tmp_path)
    assert load_config(file) == load_config(file, recorded=True) == config
    assert load_recorded_config(file) == (config, [])


def test_a_removed_key_with_another_value_is_refused_but_in_the_config_of_a_run(
    tmp_path: Path,
) -> None:
    config, file = saved(tmp_path, change=1)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert sorted(problem.key for problem in caught.value.problems) == sorted(WITH_DEFAULTS)
    assert load_config(file, recorded=True) == config
    found, left_out = load_recorded_config(file)
    assert (found, len(left_out)) == (config, len(WITH_DEFAULTS))


@pytest.mark.parametrize(("pattern", "new"), RENAMED.items())
def test_a_renamed_key_is_answered_with_its_new_name(
    tmp_path: Path, pattern: str, new: str
) -> None:
    key = pattern.replace("*", "a")
    (problem,) = problems(tmp_path, "", f"{key}=7")
    assert (problem.key, problem.remedy) == (key, f"write {new}")
    assert problem.message == f"found 7: the key is called {new} now"
    assert default_of(new) is not None


@pytest.mark.parametrize("pattern", [*REMOVED, *RENAMED])
def test_no_removed_key_is_a_key(pattern: str) -> None:
    parent, _, name = pattern.rpartition(".")
    known = keys_below(parent)
    assert known
    assert name not in known


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("cluster.ports=20100-20000", "cluster.ports"),
        ("cluster.ports=80-90", "cluster.ports"),
        ("cluster.ports=60000-70000", "cluster.ports"),
        ("cluster.interface=eth0,eth1", "cluster.interface"),
        ("cluster.interface=eth0", "cluster"),
        ("cluster.address=ray://head:10001", "cluster.address"),
        ("cluster.address=http://head:8265", "cluster.address"),
    ],
)
def test_ports_interfaces_and_addresses_that_no_process_could_use_are_problems(
    tmp_path: Path, override: str, key: str
) -> None:
    (problem,) = problems(tmp_path, "", override)
    assert problem.key == key
