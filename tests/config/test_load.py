"""Loading a config: precedence, every problem at once, and no traceback whatever the input."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.load import dump_config, load_config
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.errors import ConfigError, Problem
from tests.properties import examples

KEYS = [*RunConfig.model_fields, "async", "kind", "model", "x"]
MINIMAL = "student: {model: s}\nteachers: {a: {model: t}}\ndata: {train: a.jsonl}\n"


def load(tmp_path: Path, extra: str = "", *overrides: str) -> RunConfig:
    file = tmp_path / "c.yaml"
    file.write_text(MINIMAL + extra)
    return load_config(file, overrides)


def problems(tmp_path: Path, extra: str = "", *overrides: str) -> list[Problem]:
    with pytest.raises(ConfigError) as caught:
        load(tmp_path, extra, *overrides)
    return caught.value.problems


def test_the_defaults_hold_where_nothing_is_said(tmp_path: Path) -> None:
    assert load(tmp_path).async_.sync_steps == 4


def test_the_file_wins_over_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "train: {steps: 7}").train.steps == 7


def test_the_command_line_wins_over_the_file(tmp_path: Path) -> None:
    assert load(tmp_path, "train: {steps: 7}", "train.steps=8").train.steps == 8


def test_a_number_like_1e_5_is_a_number(tmp_path: Path) -> None:
    assert load(tmp_path, "train: {lr: 1e-5}").train.lr == 1e-5


def test_an_override_can_add_a_teacher(tmp_path: Path) -> None:
    assert load(tmp_path, "", "teachers.b.model=m").teachers["b"].model == "m"


def test_paths_are_relative_to_the_config_file(tmp_path: Path) -> None:
    (source,) = load(tmp_path).data.train
    assert source.path == str(tmp_path / "a.jsonl")  # type: ignore[union-attr]


def test_a_loss_without_a_kind_is_forward_kl(tmp_path: Path) -> None:
    assert load(tmp_path, "loss: {top_k: 3}").loss.kind == "forward_kl"


def test_the_resolved_config_loads_to_an_equal_one(tmp_path: Path) -> None:
    config = load(tmp_path, "loss: {kind: k1, clamp: 2}\nasync: {on_sync: finish}")
    (tmp_path / "again.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "again.yaml") == config


def test_a_misspelt_key_is_named_with_the_nearest_one(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "async: {sync_stepz: 3}")
    assert (problem.key, problem.remedy) == ("async.sync_stepz", "did you mean async.sync_steps?")


def test_a_key_of_another_kind_is_not_suggested_in_its_own_place(tmp_path: Path) -> None:
    extra = "loss: {kind: k2, gradient: supervised}"
    (problem,) = problems(tmp_path, extra, "loss.kind=forward_kl")
    assert problem.key == "loss.gradient"
    assert problem.message.startswith("unknown key of kind forward_kl (value 'supervised')")
    assert problem.message.endswith("k1, k2, k3, abs, binary_kl have it")
    assert problem.remedy.startswith("remove it; an override of loss.kind keeps")


def test_a_problem_names_the_file(tmp_path: Path) -> None:
    assert problems(tmp_path, "trian: 1")[0].where == str(tmp_path / "c.yaml")


def test_a_problem_of_an_override_names_the_command_line(tmp_path: Path) -> None:
    assert problems(tmp_path, "", "train.steps=many")[0].where == "command line"


def test_a_wrong_type_shows_the_value(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "train: {steps: many}")
    assert (problem.key, "'many'" in problem.message) == ("train.steps", True)


def test_a_wrong_source_has_a_key_without_tags(tmp_path: Path) -> None:
    keys = [p.key for p in problems(tmp_path, "", "data.train=[{path: a.jsonl, wieght: 2}]")]
    assert keys == ["data.train.0.wieght"]


def test_an_unknown_loss_lists_the_known_ones(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "loss: {kind: foward_kl}")
    assert (problem.key, problem.remedy) == ("loss.kind", "did you mean forward_kl?")


@pytest.mark.parametrize(
    "loss",
    [
        "{kind: k1, gradient: supervised}",
        "{kind: k1, policy_gradient: false}",
        "{kind: k1, use_policy_gradient: false}",
        "{kind: k1_supervised}",
        "{kind: k1_loss}",
        "{kind: supervised_k1}",
        "{kind: kl}",
        "{kind: K1-supervised}",
        "{kind: reverse_kl_k1}",
    ],
)
def test_k1_without_policy_gradient_is_refused_with_the_reason(tmp_path: Path, loss: str) -> None:
    found = problems(tmp_path, f"loss: {loss}")
    assert len(found) == 1
    assert "the teacher does not appear" in found[0].message
    assert "gradient: policy_gradient" in found[0].remedy


def test_k1_with_policy_gradient_is_taken(tmp_path: Path) -> None:
    assert load(tmp_path, "loss: {kind: k1}").loss.kind == "k1"


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


def test_a_key_that_is_there_twice_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "name: a\nname: b\n")
    assert "there twice" in problem.message


def test_a_batch_that_splits_groups_is_refused(tmp_path: Path) -> None:
    (problem,) = problems(tmp_path, "train: {batch_size: 6}\nrollout: {n: 4}")
    assert "multiple of rollout.n" in problem.message


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


def test_a_rank_has_its_share_of_a_row_and_of_the_parameters() -> None:
    train = TrainConfig(ranks=8, replicate=2, context_parallel=4, tokens_per_micro_batch=1001)
    assert (train.row_tokens_of_rank, train.shards) == (251, 4)


@pytest.mark.slow
@examples(300)
@given(st.text(max_size=40), st.text(max_size=20))
def test_no_override_ends_in_a_traceback(key: str, value: str) -> None:
    base = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
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


def test_a_bare_off_is_off(tmp_path: Path) -> None:
    assert load(tmp_path, "log: {wandb: off}", "log.console=off").log.wandb == "off"
