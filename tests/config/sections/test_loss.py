"""What the loss section refuses, and what it asks of the teachers."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from async_opd.config.sections.loss import Loss, RewardConfig, corrects, nucleus_faults, score_kind
from tests.world.config import run_config


def loss(**values: Any) -> Any:
    return TypeAdapter(Loss).validate_python({"kind": "forward_kl", **values})


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        ({}, "teacher_topk"),
        ({"support": "student_topk"}, "student_topk"),
        ({"support": "full_vocab"}, "hidden"),
        ({"support": "full_vocab", "weight": 0}, "sampled"),
        ({"kind": "k1"}, "sampled"),
    ],
)
def test_the_objective_says_what_a_teacher_returns(values: dict[str, Any], kind: str) -> None:
    assert score_kind(loss(**values)) == kind


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, False),
        ({"importance": "truncated"}, True),
        ({"importance": "sequence"}, True),
        ({"kind": "k2"}, True),
        ({"kind": "k2", "importance": "off"}, False),
        ({"kind": "k1", "weight": 0}, False),
    ],
)
def test_importance_weights_are_for_sampled_tokens_unless_asked_for(
    values: dict[str, Any], expected: bool
) -> None:
    assert corrects(loss(**values)) is expected


@pytest.mark.parametrize(
    ("values", "reward", "keys"),
    [
        ({}, None, []),
        ({"kind": "k1"}, None, ["loss.importance"]),
        ({"kind": "k1", "importance": "off"}, None, []),
        ({}, RewardConfig(), ["reward"]),
        ({"importance": "truncated"}, RewardConfig(), ["loss.importance", "reward"]),
        ({"importance": "sequence"}, None, ["loss.importance"]),
    ],
)
def test_a_ratio_is_refused_where_rollouts_come_from_a_nucleus(
    values: dict[str, Any], reward: RewardConfig | None, keys: list[str]
) -> None:
    for cut in ((0.9, 0, 0.0), (1.0, 20, 0.0), (1.0, 0, 0.1)):
        assert [fault[0] for fault in nucleus_faults(loss(**values), reward, *cut)] == keys
    assert nucleus_faults(loss(**values), reward, 1.0) == []


def test_everything_that_cuts_the_sampled_distribution_is_named() -> None:
    ((key, message, remedy),) = nucleus_faults(loss(), RewardConfig(), 0.9, 20, 0.1)
    assert key == "reward"
    assert message.endswith(
        "which rollout.top_p 0.9 and rollout.top_k 20 and rollout.min_p 0.1 make incomparable"
    )
    assert remedy == "rollout.top_p 1 and rollout.top_k 0 and rollout.min_p 0"


@pytest.mark.parametrize(
    ("cut", "of", "words"),
    [
        ({"top_k": 20}, {"reward": {}}, r"rollout\.top_k .* makes"),
        ({"min_p": 0.1}, {"reward": {}}, r"rollout\.min_p .* makes"),
        ({"top_p": 0.9}, {"loss": {"kind": "k1"}}, r"rollout\.top_p 0\.9 makes"),
    ],
)
def test_a_run_with_importance_over_a_part_of_the_distribution_is_refused(
    cut: dict[str, float], of: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=f"{words} incomparable"):
        run_config(rollout=cut, **of)
