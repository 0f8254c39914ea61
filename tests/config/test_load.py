"""Loading: precedence, every problem at once, nothing odd in silence, never a traceback."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from operator import attrgetter
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.keys import REMOVED, RENAMED, default_of, keys_below
from async_opd.config.load import dump_config, load_config, load_recorded_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.config.yaml_text import dump_yaml, load_yaml
from async_opd.core.errors import ConfigError, Problem
from tests.properties import examples

BEST = "checkpoint: {keep_best: eval/a/accuracy}\n"
BACK = "guardrail: {mode: roll_back}\n"
MINIMAL = "student: {model: s}\nteachers: {a: {model: t}}\ndata: {train: a.jsonl}\n"


def load(tmp_path: Path, extra: str = "", *overrides: str) -> RunConfig:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL + extra)
    return load_config(file, overrides)


def problems(tmp_path: Path, extra: str = "", *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, extra, *overrides)
    return caught.value.problems


@pytest.mark.parametrize(
    ("extra", "overrides", "key", "value"),
    [
        ("", [], "async_.sync_steps", 4),
        ("train: {steps: 7}", [], "train.steps", 7),
        ("train: {steps: 7}", ["train.steps=8"], "train.steps", 8),
        ("train: {lr: 1e-5}", [], "train.lr", 1e-5),
        ("log: {wandb: off}", ["log.console=off"], "log.wandb", "off"),
        ("loss: {top_k: 3}", [], "loss.kind", "forward_kl"),
        ("loss: {kind: k1}", [], "loss.gradient", "policy_gradient"),
        ("eval: {n: 4, temperature: 0.7}", [], "eval.n", 4),
        ("", ["student.model=org/name"], "student.model", "org/name"),
        ("", ["run_dir=runs/x"], "run_dir", "runs/x"),
    ],
)
def test_overrides_win_over_the_file_and_the_file_over_the_defaults(
    extra: str, overrides: list[str], key: str, value: object, tmp_path: Path
) -> None:
    assert attrgetter(key)(load(tmp_path, extra, *overrides)) == value


def test_an_override_can_add_a_teacher(tmp_path: Path) -> None:
    assert load(tmp_path, "", "teachers.b.model=m").teachers["b"].model == "m"


def test_paths_are_relative_to_the_config_file(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    config = load(tmp_path)
    (source,) = config.data.train
    assert source.path == str(tmp_path / "a.jsonl")  # type: ignore[union-attr]
    assert config.student.model == str(tmp_path / "s")


def test_steps_replace_the_versions_of_the_file_and_of_the_defaults(tmp_path: Path) -> None:
    steps = "checkpoint.every=null", "checkpoint.every_steps=9", "eval.every_steps=6"
    made = load(tmp_path, "checkpoint: {every: 3}", *steps)
    (tmp_path / "d.yaml").write_text(dump_config(made))
    again = load_config(tmp_path / "d.yaml", [])
    assert again == made
    assert (again.steps_between(again.checkpoint), again.steps_between(again.eval)) == (9, 6)


def test_versions_are_so_many_syncs_of_steps(tmp_path: Path) -> None:
    made = load(tmp_path, "checkpoint: {every: 3}\neval: {every: 0}\nasync: {sync_steps: 5}")
    assert (made.steps_between(made.checkpoint), made.steps_between(made.eval)) == (15, 0)


REFUSED = [
    # misspelt, misplaced and of a wrong type
    ("async: {sync_stepz: 3}", "", "async.sync_stepz", "did you mean async.sync_steps?"),
    ("async_: {sync_steps: 3}", "", "async_", "did you mean async?"),
    ("batch_size: 8", "", "batch_size", "did you mean train.batch_size?"),
    ("loss: {kind: foward_kl}", "", "loss.kind", "did you mean forward_kl?"),
    ("train: {steps: many}", "", "train.steps", "c.yaml: train.steps: "),
    ("train: {steps: many}", "", "train.steps", "'many'"),
    ("", "train.steps=many", "train.steps", "command line: "),
    ("", "data.train=[{path: a.jsonl, wieght: 2}]", "data.train.0.wieght", "unknown key"),
    ("", "data.train=[{kind: file, path: a, path: b}]", "data.train", "there twice"),
    ("", "teachers.a.sources=[x", "teachers.a.sources", "command line: "),
    ("", "teachers.b.replicas=2", "teachers.b.model", "command line: "),
    ("train: {lr: .inf}", "", "train.lr", "finite"),
    ("", "student.model=''", "student.model", "at least 1 character"),
    ("", "teachers.a.early_tokens=256", "teachers.a.early_tokens", "was removed"),
    # sections that do not fit each other
    ("train: {batch_size: 6}\nrollout: {n: 4}", "", "train.batch_size", "multiple of rollout.n"),
    (BEST + "eval: {every: 0}", "data.eval=b.jsonl", "checkpoint.keep_best", "eval.every is 0"),
    (BEST, "", "checkpoint.keep_best", "data.eval"),
    (BACK + "checkpoint: {every: 0}", "", "guardrail.mode", "checkpoint.every"),
    (
        "",
        "eval={every: 2, every_steps: 9}",
        "eval.every_steps",
        "found 9 beside eval.every, which is",
    ),
    ("checkpoint: {every: 2}", "checkpoint.every_steps=9", "checkpoint.every_steps", "every=null"),
    ("checkpoint: {every: null}", "", "checkpoint.every", "null without every_steps"),
    ("", "eval.every_steps=0", "eval.every_steps", "greater than 0"),
    (
        BEST + "eval: {every_steps: 10}",
        "data.eval=b.jsonl",
        "eval.every_steps",
        "found 10, expected a multiple of async.sync_steps (4)",
    ),
    (BACK + "supervision: {max_restarts: 0}", "", "guardrail.mode", "max_restarts"),
    ("train: {lora: {rank: 8}, offload: parameters}", "", "train.offload", "parameters"),
    # what no process could use
    ("", "cluster.ports=20100-20000", "cluster.ports", "20100"),
    ("", "cluster.ports=80-90", "cluster.ports", "80"),
    ("", "cluster.ports=60000-70000", "cluster.ports", "70000"),
    ("", "cluster.interface=eth0,eth1", "cluster.interface", "eth0,eth1"),
    ("", "cluster.interface=eth0", "cluster", "eth0"),
    ("", "cluster.address=ray://head:10001", "cluster.address", "ray://"),
    ("", "cluster.labels={rollout: {a: b}}", "cluster", "'labels' with 'address' only"),
    ("", "cluster={address: a, labels: {rollout: {a: '!b'}}}", "cluster.labels", "!b"),
    ("", "rollout.engine.pipeline_parallel=2", "rollout.engine", "kind: endpoint"),
    ("", "cluster.env={RAY_ADDRESS: x}", "cluster.env", "RAY_ADDRESS"),
    ("", "cluster.env={CUDA_VISIBLE_DEVICES: '0'}", "cluster.env", "CUDA_VISIBLE_DEVICES"),
    ("", "cluster.env={a-b: x}", "cluster.env", "a-b"),
    ("", "cluster.env={HF_TOKEN: x}", "cluster.env.HF_TOKEN", "secret"),
    ("", "cluster.env={NCCL_SOCKET_IFNAME: ib0}", "cluster", "NCCL_SOCKET_IFNAME"),
    ("", "cluster.runtime_env={env_vars: {A: b}}", "cluster.runtime_env", "cluster.env"),
    ("", "cluster.address=http://head:8265", "cluster.address", "http://"),
    *(
        (f"rollout: {{engine: {{extra: {{{name}: 1}}}}}}", "", "rollout.engine.extra", cause)
        for cause, names in {
            "need the run's own": (
                *("max_logprobs", "logprobs-mode", "worker_extension_cls", "enable_lora"),
            ),
            "changes the GPUs or the executor of an engine": (
                *("pipeline-parallel-size", "data_parallel_size", "distributed_executor_backend"),
            ),
        }.items()
        for name in names
    ),
]


@pytest.mark.parametrize(("extra", "override", "key", "words"), REFUSED)
def test_what_no_run_can_have_is_one_problem_with_its_key_and_its_cause(
    extra: str, override: str, key: str, words: str, tmp_path: Path
) -> None:
    (problem,) = problems(tmp_path, extra, *filter(None, [override]))
    assert problem.key == key
    assert words in str(problem)


@pytest.mark.parametrize(
    ("extra", "keys"),
    [
        ("loss: {kind: k1, gradient: supervised, clamp: -1}", ["loss.gradient", "loss.clamp"]),
        (
            "train: {batch_size: 6}\nqueue: {max_samples: 2}",
            ["train.batch_size", "queue.max_samples"],
        ),
        (
            "rollout: {placement: colocated, with: train}\ntrain: {offload: parameters}",
            ["train.offload"],
        ),
    ],
)
def test_no_problem_hides_another(extra: str, keys: list[str], tmp_path: Path) -> None:
    assert [problem.key for problem in problems(tmp_path, extra)] == keys


@pytest.mark.parametrize(
    ("loss", "culprit"),
    [
        ("{kind: k1, gradient: supervised}", ".gradient"),
        ("{kind: k1, policy_gradient: false}", ".policy_gradient"),
        ("{kind: k1, policy_gradient: 'no'}", ".policy_gradient"),
        ("{kind: k1, use_policy_gradient: 0}", ".use_policy_gradient"),
        ("{kind: k1, supervised: true}", ".supervised"),
        ("{kind: k1_supervised}", ".kind"),
        ("{kind: k1_loss}", ".kind"),
        ("{kind: supervised_k1}", ".kind"),
        ("{kind: K1-supervised}", ".kind"),
        ("{kind: reverse_kl_k1}", ".kind"),
        ("{kind: KL}", ".kind"),
        ("{estimator: k1_loss}", ".estimator"),
        ("kl", ""),
    ],
)
def test_k1_without_policy_gradient_is_refused_with_the_reason(
    tmp_path: Path, loss: str, culprit: str
) -> None:
    (problem,) = problems(tmp_path, f"loss: {loss}")
    assert problem.key == f"loss{culprit}"
    assert "the teacher does not appear" in problem.message
    assert "gradient: policy_gradient" in problem.remedy


def test_a_mask_without_a_bound_is_refused_and_one_with_it_sends_nothing_back(
    tmp_path: Path,
) -> None:
    (problem,) = problems(tmp_path, "async: {on_stale: mask}")
    assert problem.key == "async"
    assert "max_version_lag" in problem.message
    found = load(tmp_path, "async: {on_stale: mask, max_version_lag: 3}").async_
    assert (found.lag_to("mask"), found.lag_to("requeue")) == (3, None)


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    assert problems(tmp_path, "name: [x")[0].where.startswith(f"{tmp_path}/c.yaml:")


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


REPLACED = {key.replace("*", "a"): one.value for key, one in REMOVED.items() if one.value}


def saved(tmp_path: Path, change: float = 0, extra: str = "") -> tuple[RunConfig, Path]:
    """A config, and its file of an earlier version with the removed keys, by default as they were.

    ``change`` is added to each.
    """
    config = load(tmp_path, f"train: {{lora: {{rank: 8}}}}\n{extra}")
    tree = load_yaml(dump_config(config))
    for key, value in REPLACED.items():
        *outer, name = key.split(".")
        section = tree
        for part in outer:
            section = section[part]
        section[name] = value({}) + change
    (tmp_path / "saved.yaml").write_text(dump_yaml(tree))
    return config, tmp_path / "saved.yaml"


def test_a_saved_config_with_the_defaults_of_removed_keys_is_that_without_them(
    tmp_path: Path,
) -> None:
    config, file = saved(tmp_path)
    assert load_config(file) == load_config(file, recorded=True) == config
    assert load_recorded_config(file) == (config, [])


@pytest.mark.parametrize(
    ("change", "extra", "refused"),
    [
        (1, "", REPLACED.keys()),
        (0, "guardrail: {window: 50}", {"guardrail.baseline_steps"}),
        (0, "supervision: {timeout_s: 600}", {"supervision.heartbeat_s"}),
        (0, "eval: {samples_mib: 1}", {"eval.samples_total_mib"}),
    ],
)
def test_a_removed_key_that_would_change_is_refused_but_in_the_config_of_a_run(
    tmp_path: Path, change: float, extra: str, refused: Collection[str]
) -> None:
    config, file = saved(tmp_path, change, extra)
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    assert {problem.key for problem in caught.value.problems} == set(refused)
    assert load_config(file, recorded=True) == config
    found, left_out = load_recorded_config(file)
    assert (found, {problem.key for problem in left_out}) == (config, set(refused))


def test_a_removed_key_on_the_command_line_is_refused_also_for_a_run_directory(
    tmp_path: Path,
) -> None:
    _, file = saved(tmp_path)
    with pytest.raises(ConfigError) as caught:
        load_config(file, ["guardrail.baseline_steps=20"], recorded=True)
    assert [problem.key for problem in caught.value.problems] == ["guardrail.baseline_steps"]


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


def test_the_resolved_config_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = load(tmp_path, "loss: {kind: k1, clamp: 2}\nasync: {on_sync: finish}")
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_a_key_of_another_kind_is_not_suggested_in_its_own_place(tmp_path: Path) -> None:
    extra = "loss: {kind: k2, gradient: supervised}"
    (problem,) = problems(tmp_path, extra, "loss.kind=forward_kl")
    assert problem.key == "loss.gradient"
    assert problem.message.startswith("unknown key of kind forward_kl (value 'supervised')")
    assert problem.message.endswith("k1, k2, k3, abs, binary_kl have it")
    assert problem.remedy.startswith("remove it; an override of loss.kind keeps")


def test_a_problem_names_the_file(tmp_path: Path) -> None:
    assert problems(tmp_path, "trian: 1")[0].where == str(tmp_path / "c.yaml")


def test_all_problems_come_together(tmp_path: Path) -> None:
    found = problems(tmp_path, "trian: 1\ntrain: {steps: x, lr: -1}", "async.on_sync=never")
    assert {p.key for p in found} == {"trian", "train.steps", "train.lr", "async.on_sync"}


def test_a_missing_section_is_named(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text("student: {model: s}\nteachers: {a: {model: t}}\n")
    with pytest.raises(ConfigError, match="data: is missing"):
        load_config(tmp_path / "c.yaml")


def test_a_missing_file_is_a_problem_and_no_traceback(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("train", "remedy"),
    [
        ("{ranks: 6, context_parallel: 4}", "for example 8"),
        ("{ranks: 4, replicate: 2, context_parallel: 4}", "for example 8"),
        ("{replicate: 2}", "for example 2"),
    ],
)
def test_ranks_that_do_not_divide_into_copies_and_contexts_are_refused_with_all_other_problems(
    tmp_path: Path, train: str, remedy: str
) -> None:
    found = problems(tmp_path, f"train: {train}\nrollout: {{n: 3}}")
    assert [problem.key for problem in found] == ["train.batch_size", "train.ranks"]
    assert "train.replicate × train.context_parallel" in found[1].message
    assert found[1].remedy == remedy


def test_a_rank_has_its_share_of_the_parameters() -> None:
    assert TrainConfig(ranks=8, replicate=2).shards == 4


@pytest.mark.slow
@examples(300)
@given(st.text(max_size=40), st.text(max_size=20))
def test_no_override_ends_in_a_traceback(key: str, value: str) -> None:
    base = yaml.safe_load(MINIMAL)
    for override in (
        key,
        f"{key}={value}",
        f"train.steps={value}",
        f"loss={value}",
        f"data={value}",
    ):
        with contextlib.suppress(ConfigError):
            load_config(base, [override])


@examples(200)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from([*RunConfig.model_fields, "async", "kind", "model", "x"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_file_ends_in_a_traceback(
    tmp_path_factory: pytest.TempPathFactory, tree: object
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.yaml"
    file.write_text(yaml.safe_dump(tree))
    with contextlib.suppress(ConfigError):
        load_config(file)


@pytest.mark.parametrize(
    ("extra", "overrides", "key", "message", "remedy"),
    [
        ("train: {steps: 99999999999999999999999}", [], "train.steps", "less than 2147483648", ""),
        ("rollout: {max_tokens: 2147483648}", [], "rollout.max_tokens", "less than", ""),
        ("seed: 4294967296", [], "seed", "less than 2147483648", "the default is 0"),
        ("seed: -1", [], "seed", "greater than or equal to 0", ""),
        ("train: {lr: 5}", [], "train.lr", "less than or equal to 1", "the default is 1e-05"),
        ("train: {lr: 1e26}", [], "train.lr", "found 1e+26", ""),
        ("", ["cluster.device=tpu"], "cluster.device", "'cuda'", ""),
        ("", ["student=path"], "student", "keys and values", "write student: {model: path}"),
        ("", ["teachers.a=t"], "teachers.a", "keys and values", "write a: {model: t}"),
        ("loss: k2", [], "loss", "keys and values", "write loss: {kind: k2}"),
        ("train: 5", [], "train", "keys and values", "keys of train: steps, epochs"),
        ("cluster: {ports: [1]}", [], "cluster.ports", "found [1]", "Ports, as `20000-20099`"),
        ("cluster: {ports: '80'}", [], "cluster.ports", "found '80'", "Ports, as `20000-20099`"),
        ("cluster: {gpus: 8}", [], "cluster.gpus", "unknown key", "train.ranks; async_opd plan"),
        ("gpus: 8", [], "gpus", "unknown key", "rollout.replicas × rollout.tensor_parallel"),
        ("loss.kind: forward_kl", [], "loss.kind", "unknown key", "loss: {kind: 'forward_kl'}"),
        ("train.steps: 5", [], "train.steps", "unknown key (value 5)", "train: {steps: 5}"),
        ("rollout: {engine.extra.a: 1}", [], "", "", "YAML: engine: {extra: {a: 1}}"),
        ("eval: {n: 4}", [], "eval.n", "found 4, but with eval.temperature 0", "as to 0.7"),
        ("train: {steps: 2, epochs: 1, lr: 0.1}", [], "train", "{'epochs': 1, 'steps': 2}", ""),
        ("rollout: {max_token: 8}", [], "", "value 8", "did you mean rollout.max_tokens?"),
        ("common: {a: 1}", [], "common", "unknown key", "YAML anchors begins with x-"),
    ],
)
def test_a_mistake_is_answered_with_what_to_write(
    extra: str, overrides: list[str], key: str, message: str, remedy: str, tmp_path: Path
) -> None:
    (problem,) = problems(tmp_path, extra, *overrides)
    assert key in ("", problem.key)
    assert message in problem.message
    assert "Config" not in problem.message
    assert remedy in problem.remedy


def test_gpu_means_cuda(tmp_path: Path) -> None:
    for name in ("gpu", "GPUs"):
        assert load(tmp_path, "", f"cluster.device={name}").cluster.device == "cuda"


def test_keys_that_begin_with_x_hold_anchors(tmp_path: Path) -> None:
    config = load(tmp_path, "x-rate: &rate {lr: 1e-4}\ntrain: {<<: *rate, steps: 7}\n")
    assert (config.train.lr, config.train.steps) == (1e-4, 7)


def test_a_config_in_another_encoding_is_refused_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_bytes(f"{MINIMAL}name: été\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"c.yaml:4: is not UTF-8\n +→ save the file as UTF-8"):
        load_config(tmp_path / "c.yaml")


def test_the_config_in_a_run_directory_is_named_where_the_directory_was_given(
    tmp_path: Path,
) -> None:
    load(tmp_path)
    (tmp_path / "c.yaml").rename(tmp_path / "config.yaml")
    with pytest.raises(ConfigError, match=f"did you mean {tmp_path}/config.yaml"):
        load_config(str(tmp_path))


def test_a_config_of_a_similar_name_is_named(tmp_path: Path) -> None:
    load(tmp_path)
    with pytest.raises(ConfigError, match=r"No such file or directory\n.*did you mean .*c.yaml"):
        load_config(str(tmp_path / "c.yml"))


def test_problems_of_a_config_say_that_its_inputs_were_not_looked_at(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="models and data are not examined yet"):
        load(tmp_path, "train: {steps: -1}")
