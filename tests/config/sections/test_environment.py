"""Episodes of several turns: keys that a kind lacks or does not take are refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.config.load import load_config
from async_opd.core.errors import ConfigError, Problem
from tests.checks.inputs import EXAMPLE
from tests.world.config import run_config

CLASS = {"kind": "class", "factory": "m:Wordle"}


def problem(*overrides: str) -> Problem:
    with pytest.raises(ConfigError) as refused:
        load_config(EXAMPLE, overrides)
    (found,) = refused.value.problems
    return found


@pytest.mark.parametrize("kind", ["program", "verifiers", "openenv"])
def test_kinds_that_are_not_built_yet_are_refused_by_name(kind: str) -> None:
    found = problem(f"environment={{kind: {kind}}}")
    assert found.key == "environment.kind"
    assert f"{kind}, which is not built yet" in found.message
    assert "use kind: class" in found.remedy


@pytest.mark.parametrize(
    ("section", "key", "words"),
    [
        ("{kind: class}", "factory", "which kind: class needs"),
        ("{kind: tools}", "tools", "which kind: tools needs"),
        ("{kind: gymnasium}", "id", "which kind: gymnasium needs"),
        ("{kind: class, factory: Wordle}", "factory", "expected module:name"),
        ("{kind: tools, tools: [add]}", "tools", "expected module:name"),
        ("{kind: tools, tools: ['a:add', 'b:add']}", "tools", "found 'add' twice"),
        ("{kind: tools, tools: ['a:b'], kwargs: {c: 1}}", "kwargs", "does not take"),
        ("{kind: class, factory: 'm:C', actions: [up]}", "actions", "does not take"),
        ("{kind: gymnasium, id: A-v0, actions: [up, up]}", "actions", "found 'up' twice"),
        ("{kind: class, factory: 'm:C', timeouts: {step_s: 0}}", "timeouts.step_s", "greater"),
        ("{kind: class, factory: 'm:C', turns: 3}", "turns", "unknown key"),
    ],
)
def test_keys_that_a_kind_lacks_or_does_not_take_are_refused(
    section: str, key: str, words: str
) -> None:
    found = problem(f"environment={section}")
    assert found.key == f"environment.{key}"
    assert words in found.message
    assert found.remedy


def test_routing_of_the_engine_is_not_replayed_in_episodes() -> None:
    found = problem("environment={kind: class, factory: 'm:C'}", "train.routing=replay")
    assert found.key == "train.routing"


@pytest.mark.parametrize("key", ["turn_baseline", "per_turn_advantages", "normalize_by_turn_index"])
def test_baselines_by_turn_index_are_refused_by_name(key: str) -> None:
    found = problem(f"reward.{key}=true", "reward.grader=exact")
    assert found.key == f"reward.{key}"
    assert "biased where episodes differ in their turns" in found.message


@pytest.mark.parametrize(
    "section",
    [CLASS, {"kind": "tools", "tools": ["m:f"]}, {"kind": "gymnasium", "id": "FrozenLake-v1"}],
)
def test_each_kind_needs_one_key_only(section: dict[str, Any]) -> None:
    assert run_config(environment=section).environment is not None


def test_an_id_with_a_module_is_code_of_the_users() -> None:
    made = [run_config(environment={"kind": "gymnasium", "id": one}) for one in ("m:A-v0", "A-v0")]
    found = [one.environment.code for one in made if one.environment is not None]
    assert found == [["m:A-v0"], []]


def test_without_the_section_every_rollout_is_one_answer() -> None:
    assert run_config().environment is None
