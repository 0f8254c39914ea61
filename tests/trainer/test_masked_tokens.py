"""Tokens beyond the bound of staleness weigh nothing in the distillation loss, and are counted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.loss import ForwardKLConfig, Reduction, RewardConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Sample, VersionSpan
from async_opd.microscope import CLAMPS, MICROSCOPE, RecordWriter, records
from tests.sequences import sequence
from tests.trainer.models import headers_of, kept_gradients, random_sample, tiny_model
from tests.trainer.ranks import CPU, mesh_of, on_ranks
from tests.trainer.test_recorder import Numbers
from trainer.batches.balance import Balancing
from trainer.batches.batch_metrics import masked_by_turn, masked_shares, masked_tokens
from trainer.batches.token_weights import TokenWeighting
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.rank import Rank
from trainer.rank_group import RankSpec
from trainer.recorder import Recorder
from trainer.replay.kept_step import quantities_of
from trainer.student.placed import PlacedStudent

Gradients = dict[str, torch.Tensor]
Versions = Sequence[Sequence[int]]
MIXED: Versions = [[1, 1, 3], [3], [], [1, 2], [2, 3, 3, 3], [0]]
"""The version of each token of a batch; the trainer's is 4 in the tests."""


def batch(versions: Versions = MIXED, rewards: bool = False) -> list[Sample]:
    """Samples whose tokens are of these versions, of teachers a and b; three are a group."""
    made = []
    for index, own in enumerate(versions):
        sample = random_sample(index, len(own), k=6)
        spans = tuple(VersionSpan(version, i, i + 1) for i, version in enumerate(own))
        prompt = replace(sample.rollout.prompt, teacher="ab"[index % 2])
        rollout = replace(
            sample.rollout,
            uid=f"p{index // 3}/{index}",
            prompt=prompt,
            version_spans=spans,
            reward=float(index % 3 == 0) if rewards else None,
        )
        made.append(replace(sample, rollout=rollout))
    return made


def learner_of(
    lag: int | None, reward: RewardConfig | None = None, budget: int = 10**6, **loss: Any
) -> tuple[Learner, Rank]:
    config = ForwardKLConfig(**loss)
    train = TrainConfig(
        tokens_per_micro_batch=budget, max_grad_norm=1e9, warmup_steps=0, weight_decay=0
    )
    rank = Rank(PlacedStudent(tiny_model().double(), build_objective(config, reward), train, CPU))
    made = Learner(rank, TokenWeighting.of(config, reward, 20, {"a": 2.0, "b": 0.5}, lag))
    made.version = 4
    return made, rank


def trained(
    samples: list[Sample], lag: int | None, reward: RewardConfig | None = None, **more: Any
) -> tuple[Gradients, dict[str, float]]:
    """The gradients that a step would have used, and its metrics; float64."""
    learner, rank = learner_of(lag, reward, **more)
    kept = kept_gradients(rank)
    return kept, learner.train_batch(samples).metrics


def close(one: Gradients, other: Gradients) -> bool:
    return all(torch.allclose(one[name], other[name], atol=1e-6) for name in one)


def equal(one: Gradients, other: Gradients) -> bool:
    return bool(one) and all(torch.equal(one[name], other[name]) for name in one)


# ── weights and denominators ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [
        ("token_mean", [1 / 7, 1 / 7, 1 / 7, 1 / 7]),
        ("seq_mean_token_mean", [1 / 4, 1 / 4, 1 / 4, 1 / 16]),
        ("seq_mean_token_sum", [1 / 4, 1 / 4, 1 / 4, 1 / 4]),
        ("seq_mean_token_sum_norm", [1 / 80, 1 / 80, 1 / 80, 1 / 80]),
    ],
)
def test_denominators_have_no_masked_token(reduction: Reduction, expected: list[float]) -> None:
    """Of version 2 and later ones four samples have 1, 1, 1 and 4 tokens, two have none."""
    made, _ = TokenWeighting(reduction=reduction, max_tokens=20)(headers_of(batch()), 2)
    found = [one.weight for one, own in zip(made, MIXED, strict=True) if max([0, *own]) >= 2]
    assert found == pytest.approx(expected)


VERSIONS = st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=8)


@given(VERSIONS, st.integers(0, 7))
def test_the_tokens_that_are_left_weigh_one_in_all(versions: Versions, oldest: int) -> None:
    headers = headers_of(batch(versions))
    for reduction in ("token_mean", "seq_mean_token_mean"):
        weights, _ = TokenWeighting(reduction=reduction)(headers, oldest)
        tokens = [sum(v >= oldest for v in own) for own in versions]
        total = sum(one.weight * n for one, n in zip(weights, tokens, strict=True))
        assert total == pytest.approx(float(any(tokens)))


@given(VERSIONS, st.integers(0, 7))
def test_a_header_counts_the_tokens_that_payloads_mask(versions: Versions, oldest: int) -> None:
    """It says nothing of versions if there is only one."""
    for sample in batch(versions):
        header, masked = sample.header, masked_tokens(sample.rollout, oldest)
        assert header.response_tokens - header.tokens_since(oldest) == masked.sum()
        several = len({span.version for span in sample.rollout.version_spans}) > 1
        assert bool(header.versions) == several


@pytest.mark.parametrize("reduction", get_args(Reduction))
@given(versions=VERSIONS, oldest=st.integers(0, 7), auto=st.booleans())
def test_factors_make_planned_weights_those_of_the_tokens_that_are_left(
    reduction: Reduction, versions: Versions, oldest: int, auto: bool
) -> None:
    headers = headers_of(batch(versions))
    weighting = TokenWeighting(reduction=reduction, max_tokens=20, auto=auto)
    balancing = Balancing(weighting)
    factors = balancing.factors(headers, oldest)
    weights = {key.split("/")[1]: value for key, value in balancing.trained({}, "").items()}
    expected = replace(weighting, teachers=weights)(headers, oldest)[0]
    for header, planned, wanted in zip(headers, weighting(headers)[0], expected, strict=True):
        if header.tokens_since(oldest):
            found = planned.weight * factors.get(header.uid, 1.0)
            assert found == pytest.approx(wanted.weight)


def test_masked_tokens_have_no_part_in_the_masses_of_teachers() -> None:
    """Teacher a has 2 + 4 tokens of version 3, b has 1: of the first step's weights each a half."""
    versions = [[3, 3], [1, 1, 3], [3] * 4, [0, 0, 0]]
    balancing = Balancing(TokenWeighting(auto=True))
    balancing.factors(headers_of(batch(versions)), 3)
    found = balancing.trained({}, "")
    assert found["teacher/b/weight"] / found["teacher/a/weight"] == pytest.approx(6.0)


# ── a step ─────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_neither_a_split_nor_a_plan_of_an_older_version_changes_a_step(reduction: Any) -> None:
    """Several ranks plan a batch while the trainer still has another version."""
    whole, metrics = trained(batch(), 2, reduction=reduction)
    learner, rank = learner_of(2, budget=5, reduction=reduction)
    kept = kept_gradients(rank)
    learner.version = 0
    plan = learner.plan(headers_of(batch()))
    learner.version = 4
    found = learner.train_again(plan, batch()).metrics
    assert close(whole, kept)
    assert found["loss/total"] == pytest.approx(metrics["loss/total"])


def test_the_teachers_scores_of_masked_tokens_change_no_bit_of_the_gradient() -> None:
    changed = []
    for sample in batch():
        scores: Any = sample.scores
        masked = masked_tokens(sample.rollout, 2)
        other = np.where(masked[:, None], np.roll(scores.logprobs, 1, 1), scores.logprobs)
        changed.append(replace(sample, scores=replace(scores, logprobs=other)))
    one, metrics = trained(batch(), 2)
    other, others = trained(changed, 2)
    assert equal(one, other)
    names = ("loss/total", "loss/distillation", "teacher/a/loss", "teacher/b/gap", "source/s/loss")
    assert [metrics[name] for name in names] == [others[name] for name in names]
    assert not equal(one, trained(changed, None)[0])


@pytest.mark.parametrize(("versions", "lag"), [(MIXED, 4), (MIXED, 10**6), ([[3, 4], [2]], 2)])
def test_a_bound_that_no_token_exceeds_changes_no_bit(versions: Versions, lag: int) -> None:
    one, metrics = trained(batch(versions), None)
    other, others = trained(batch(versions), lag)
    assert equal(one, other)
    assert others.pop("staleness/masked_tokens") == 0
    assert quantities_of(metrics) == quantities_of(others)


@pytest.mark.parametrize("reduction", get_args(Reduction))
def test_of_responses_of_one_version_the_step_is_that_of_the_fresh_ones(reduction: Any) -> None:
    versions = [[1] * 3, [3] * 2, [3] * 4, [0]]
    fresh = [batch(versions)[1], batch(versions)[2]]
    masked, metrics = trained(batch(versions), 1, reduction=reduction)
    alone, others = trained(fresh, 1, reduction=reduction)
    assert close(masked, alone)
    for name in ("loss/total", "loss/distillation", "loss/entropy", "importance/mean"):
        assert metrics[name] == pytest.approx(others[name])
    assert metrics["staleness/masked_tokens"] == 4 / 10
    assert metrics["teacher/b/token_share"] == pytest.approx(others["teacher/b/token_share"])


def test_a_batch_that_is_masked_whole_is_a_step_that_changes_no_weight() -> None:
    learner, _ = learner_of(0)
    learner.train_batch(batch([[4, 4], [4]]))  # the optimizer has moments
    before = {name: tensor.clone() for name, tensor in learner.model.state_dict().items()}
    report = learner.train_batch(batch([[3, 3], [1, 2], []]))
    assert (report.metrics["loss/total"], report.metrics["train/grad_norm"]) == (0.0, 0.0)
    assert (report.skipped, report.metrics["staleness/masked_tokens"]) == ("", 1.0)
    after = learner.model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert learner.train_batch(batch([[4]])).metrics["train/lr"] > 0


def test_the_reward_trains_whole_responses_and_says_so() -> None:
    reward = RewardConfig(weight=0.5)
    every = batch(rewards=True)
    distilled, _ = trained(every, 2)
    rewarded, alone = trained(every, None, reward, weight=0)
    mixed, metrics = trained(every, 2, reward)
    assert close(mixed, {name: distilled[name] + rewarded[name] for name in mixed})
    assert metrics["staleness/masked_tokens"] == metrics["staleness/reward_tokens"] == 4 / 11
    for name in ("loss/surrogate", "importance/mean", "importance/ess", "loss/rollout_gap"):
        assert metrics[name] == pytest.approx(alone[name])


def test_the_reward_trains_no_old_token_of_a_response_that_its_mask_excludes() -> None:
    every = [replace(one, finish_reason="length") for one in headers_of(batch())]
    weighting = TokenWeighting(reward_weight=1.0, max_lag=2, mask_truncated_rewards=True)
    expected = {"staleness/masked_tokens": 4 / 11, "staleness/reward_tokens": 0.0}
    assert weighting.masked(every, 2) == expected


def test_of_a_batch_that_is_masked_whole_the_reward_is_trained_alone() -> None:
    every = batch([[1, 1], [2], [1, 2, 2]], rewards=True)
    found, metrics = trained(every, 0, RewardConfig())
    alone, others = trained(every, None, RewardConfig(), weight=0)
    assert close(found, alone)
    assert metrics["loss/total"] == pytest.approx(others["loss/total"])
    assert "loss/distillation" not in metrics


# ── turns, records, ranks ──────────────────────────────────────────────────────────────────────


def test_the_share_of_masked_tokens_is_known_of_each_turn() -> None:
    """Those after the eighth count together; a response of one turn in none."""
    after = [part for _ in range(10) for part in (("student", 2), ("tool", 1))]
    rollout = sequence("p/0", after, media=False)
    spans = (VersionSpan(1, 0, 3), VersionSpan(2, 3, 7), VersionSpan(3, 7, 20))
    several = replace(rollout, version_spans=spans)
    single = random_sample(0, 4).rollout
    counts, later = (masked_by_turn([several, single], oldest) for oldest in (2, 3))
    prefix = "staleness/masked_tokens/turn_"
    names = [*(f"{prefix}{turn}" for turn in range(1, 9)), f"{prefix}after_8"]
    found = masked_shares([counts])
    assert [found.pop(name) for name in names] == [1.0, 1 / 2, *[0.0] * 7]
    assert found == {}
    both = masked_shares([counts, later])
    assert [both[name] for name in names[:5]] == [1.0, 3 / 4, 1 / 2, 1 / 4, 0.0]


def test_the_record_of_a_token_has_its_mask(tmp_path: Path) -> None:
    learner, rank = learner_of(2)
    writer = RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 20)
    rank.recorder = Recorder(writer, seed=0, share=1.0, top_k=3, speller=Numbers)
    learner.train_batch(batch())
    learner.compared("flush_records")
    found = {one.uid: one for one in records(tmp_path)}
    masked = (found["p0/0"]["clamps"] & CLAMPS["masked"]) != 0
    assert masked.tolist() == [True, True, False]
    assert found["p0/0"]["total"].tolist()[:2] == [0.0, 0.0]
    assert found["p0/0"]["version"].tolist() == [1, 1, 3]


def of_ranks(spec: RankSpec | None) -> Rank:
    train = TrainConfig(tokens_per_micro_batch=16, warmup_steps=0)
    return Rank(
        PlacedStudent(
            tiny_model(), build_objective(ForwardKLConfig()), train, CPU, mesh=mesh_of(spec)
        )
    )


STEPS: list[Versions] = [
    MIXED,
    [[1, 1], [3], [1, 1, 1, 0], [3, 3]],
    [[1, 1], [0], [1, 1, 1, 0]],
    [[0], [0, 3]],
]
"""Batches of which some samples, all samples, and all but one token are masked."""


def steps(learner: Learner) -> dict[str, Any]:
    learner.version = 4
    found = [learner.train_batch(batch(versions)).metrics for versions in STEPS]
    names = ("loss/total", "loss/distillation", "train/grad_norm", "staleness/masked_tokens")
    kept = [[one.get(name, -1.0) for name in names] for one in found]
    return {"metrics": kept, "weights": dict(learner.named_weights())}


@pytest.mark.slow
def test_two_ranks_mask_as_one_does_also_where_one_of_them_has_no_token_left() -> None:
    weighting = TokenWeighting(max_lag=2)
    alone = steps(Learner(of_ranks(None), weighting))
    found = on_ranks(2, of_ranks, steps, weighting)
    for one, other in zip(alone["metrics"], found["metrics"], strict=True):
        assert other == pytest.approx(one, rel=1e-4, abs=1e-7)
    for name, weight in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], weight, rtol=1e-4, atol=2e-6)
