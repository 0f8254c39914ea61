"""``replicas`` as a number and as a range."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from async_opd.config.load import dump_config
from async_opd.config.run_config import RunConfig
from async_opd.config.yaml_text import load_yaml
from tests.world.config import run_config

RANGE = {"min": 2, "max": 8}
JOINED = {"address": "auto"}


def bounds(config: RunConfig) -> list[tuple[int, int]]:
    pools = (config.rollout, config.eval, *config.teachers.values())
    return [(pool.min_replicas, pool.max_replicas) for pool in pools]


def elastic(**sections: Any) -> RunConfig:
    pools = {"teachers": {"t": {"model": "t", "replicas": {"min": 1, "max": 3}}}}
    return run_config(**{"rollout": {"replicas": RANGE}, **pools, "cluster": JOINED, **sections})


def test_a_pool_has_the_bounds_of_its_range_and_a_number_is_both_bounds() -> None:
    assert bounds(elastic(eval={"replicas": 2})) == [(2, 8), (2, 2), (1, 3)]


def test_a_range_is_the_same_after_it_was_written_and_read() -> None:
    made = elastic(eval={"replicas": {"min": 1, "max": 2}})
    assert RunConfig.model_validate(load_yaml(dump_config(made))) == made


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"min": 3, "max": 2}, r"max: at least min \(3\)"),
        ({"min": 0, "mx": 2}, "'mx' is not a key here; min: a number from 1 on; max: a number"),
        ("many", "a number from 1 on, or {min: 2, max: 8}"),
        (True, "a number from 1 on"),
    ],
)
def test_another_value_is_refused_with_all_that_is_wrong_with_it(given: Any, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        elastic(rollout={"replicas": given})


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"cluster": {}}, "rollout.replicas.*one machine(?s:.*)teachers.t.replicas.*one machine"),
        (
            {
                "rollout": {"replicas": RANGE, "placement": "colocated", "with": "train"},
                "teachers": {"t": {"model": "t"}},
            },
            "rollout.replicas.*share GPUs",
        ),
        (
            {
                "teachers": {"t": {"model": "t", "placement": "colocated", "with": "rollout"}},
            },
            "rollout.replicas.*share GPUs",
        ),
    ],
)
def test_pools_that_cannot_follow_the_cluster_are_refused(
    sections: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        elastic(**sections)
