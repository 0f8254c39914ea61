"""From values of tokens to the metrics of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from trainer.losses.report import concat_metrics, merged, step_metrics, token_sums


def values(ratio: list[float]) -> dict[str, torch.Tensor]:
    tensor = torch.tensor(ratio)
    return {"total": tensor * 0 + 0.25, "clamped": tensor > 1, "importance": tensor}


def metrics_of(
    found: dict[str, torch.Tensor], teachers: Sequence[tuple[str, int]] = ()
) -> dict[str, float]:
    """The metrics of a step of one micro-batch; of no teachers, those of no owner of tokens."""
    return step_metrics([merged([token_sums(found, *owned(teachers))])])


def owned(
    teachers: Sequence[tuple[str, int]],
) -> tuple[torch.Tensor | None, list[tuple[str, str, str]]]:
    """The owners of consecutive tokens of teachers, all of one data source, without episodes."""
    indices = [index for index, (_, count) in enumerate(teachers) for _ in range(count)]
    names = [(name, "source", "") for name, _ in teachers]
    return torch.tensor(indices, dtype=torch.int32) if teachers else None, names


def test_the_total_is_a_sum_and_everything_else_a_mean() -> None:
    metrics = metrics_of(values([0.5, 2.0, 0.5, 1.0]))
    assert metrics["loss/total"] == 1.0
    assert metrics["loss/clamped"] == 0.25


def test_the_importance_ratio_is_reported_by_mean_largest_and_effective_sample_size() -> None:
    metrics = metrics_of(values([1.0, 3.0]))
    assert (metrics["importance/mean"], metrics["importance/max"]) == (2, 3)
    assert metrics["importance/ess"] == pytest.approx(16 / (2 * 10))
    assert metrics_of(values([0.7] * 5))["importance/ess"] == pytest.approx(1.0)


def test_weights_are_reported_beside_the_ratio_where_there_are_some() -> None:
    weights = {
        "truncated": torch.tensor([False, True]),
        "importance_weight": torch.tensor([1.0, 2.0]),
    }
    plain, metrics = metrics_of(values([1.0, 3.0])), metrics_of(values([1.0, 3.0]) | weights)
    found = [metrics[f"importance/{key}"] for key in ("truncated", "weight", "mean")]
    assert found == [0.5, 1.5, 2]
    assert not any("importance" in key for key in metrics if key.startswith("loss/"))
    assert not {"importance/truncated", "importance/weight"} & plain.keys()
    assert step_metrics([merged([])]) == {"loss/total": 0.0}  # of no tokens


def test_agreement_is_a_mean_over_the_tokens_of_each_teacher() -> None:
    gaps = values([1.0] * 4) | {"agreement": torch.tensor([-1.0, -2.0, -6.0, -3.0])}
    metrics = metrics_of(gaps, [("a", 2), ("b", 1), ("none", 0), ("a", 1)])
    found = {key: value for key, value in metrics.items() if "agreement" in key}
    assert found == {"teacher/a/agreement": -2.0, "teacher/b/agreement": -6.0}


def test_the_metrics_of_several_ranks_and_micro_batches_are_those_of_all_tokens() -> None:
    gap = torch.tensor([-1.0, -2.0, -6.0, -3.0])
    whole = values([1.0, 3.0, 0.5, 2.0]) | {"agreement": gap}
    parts = [{name: value[at] for name, value in whole.items()} for at in (slice(3), slice(3, 4))]
    one = [token_sums(parts[0], *owned([("a", 2), ("b", 1)])), {}]
    other = [token_sums(parts[1], *owned([("a", 1)]))]
    found = step_metrics([merged(one), merged(other), merged([])])
    assert found == metrics_of(whole, [("a", 2), ("b", 1), ("a", 1)])


def test_each_teacher_has_the_means_of_its_own_tokens_and_their_share() -> None:
    torch.manual_seed(0)
    found = values([1.0] * 6) | {
        name: torch.randn(6, dtype=torch.float64)
        for name in ("distillation", "k1", "entropy", "teacher_entropy", "student_topk_mass")
    }
    metrics = metrics_of(found, [("a", 2), ("b", 1), ("none", 0), ("a", 3)])
    rows = [0, 1, 3, 4, 5]
    for name, key in (("distillation", "loss"), ("k1", "gap"), ("entropy", "student_entropy")):
        assert metrics[f"teacher/a/{key}"] == pytest.approx(found[name].numpy()[rows].mean())
        assert metrics[f"teacher/b/{key}"] == pytest.approx(found[name][2].item())
    shares = {key: metrics[key] for key in metrics if key.endswith("token_share")}
    assert shares.pop("source/source/token_share") == 1
    assert shares == pytest.approx({"teacher/a/token_share": 5 / 6, "teacher/b/token_share": 1 / 6})


def test_tokens_whose_overlap_is_not_measured_are_in_no_mean() -> None:
    nan = float("nan")
    found = values([1.0] * 4) | {"topk_overlap": torch.tensor([0.5, nan, nan, 1.0])}
    metrics = metrics_of(found, [("a", 2), ("b", 1), ("c", 1)])
    assert metrics["loss/topk_overlap"] == 0.75
    assert metrics["teacher/a/topk_overlap"] == 0.5
    assert "teacher/b/topk_overlap" not in metrics


def test_a_largest_ratio_that_is_no_number_is_reported() -> None:
    parts = [merged([token_sums(values([ratio]))]) for ratio in (1.0, math.nan, 2.0)]
    assert math.isnan(step_metrics(parts)["importance/max"])


def test_the_values_of_chunks_are_joined_and_empty_ones_left_out() -> None:
    found = concat_metrics([values([1.0]), {}, values([2.0, 3.0])])
    assert found["importance"].tolist() == [1.0, 2.0, 3.0]
