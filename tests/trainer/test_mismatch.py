"""The mismatch of engines and trainer: from tokens that were sampled under the trained weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from async_opd.config.sections.loss import ForwardKLConfig
from async_opd.config.sections.train import TrainConfig
from async_opd.core.samples import Rollout, Sample, VersionSpan
from benchmarks.local_ranks import in_processes
from tests.trainer.models import random_sample, tiny_model
from tests.trainer.test_learner import learner
from trainer.batches.packing import pack
from trainer.follower import Follower
from trainer.learner import Learner
from trainer.losses import build_objective
from trainer.losses.mismatch import FreshTokens, Gaps, gaps_of, mismatch
from trainer.losses.objective import LOG_RATIO, MAX_LOG_RATIO
from trainer.rank import Rank
from trainer.rank_group import SINGLE_RANK, RankGroup, RankSpec
from trainer.student.placed import PlacedStudent
from trainer.student.sharding import join_mesh

CPU = torch.device("cpu")

SIZES = [5, 1, 9, 3]
KEYS = {"mismatch/kl", "mismatch/p99", "mismatch/error", "mismatch/ess"}


def gaps(*responses: Sequence[float]) -> Gaps:
    numbers = np.repeat(np.arange(len(responses)), [len(one) for one in responses])
    return Gaps(np.concatenate(responses).astype(np.float32), numbers)


def drawn(seed: int, *lengths: int, scale: float = 0.1) -> list[list[float]]:
    random = np.random.default_rng(seed)
    return [random.normal(0, scale, length).astype(np.float32).tolist() for length in lengths]


def oracle(responses: Sequence[Sequence[float]]) -> dict[str, float]:
    """The formulas of the module, by plain loops over float64."""
    every = [d for one in responses for d in one]
    ordered, place = sorted(map(abs, every)), 0.99 * (len(every) - 1)
    low = ordered[math.floor(place)]
    high = ordered[math.ceil(place)]
    weights = [math.exp(math.fsum(one)) for one in responses]
    return {
        "mismatch/kl": math.fsum(math.expm1(d) - d for d in every) / len(every),
        "mismatch/p99": low + (high - low) * (place - math.floor(place)),
        "mismatch/error": math.fsum(math.exp(abs(d)) for d in every) / len(every),
        "mismatch/ess": sum(weights) ** 2 / (len(weights) * sum(w * w for w in weights)),
    }


@pytest.mark.parametrize("lengths", [(1,), (4, 2), (7, 1, 30, 3)])
def test_the_metrics_are_those_of_their_formulas(lengths: tuple[int, ...]) -> None:
    responses = drawn(1, *lengths)
    assert mismatch([gaps(*responses)]) == pytest.approx(oracle(responses), rel=1e-12)


def test_small_gaps_lose_no_digits() -> None:
    responses = drawn(2, 50, 50, scale=1e-5)
    found = mismatch([gaps(*responses)])
    second_order = np.mean(np.concatenate(responses) ** 2) / 2
    assert found["mismatch/kl"] == pytest.approx(second_order, rel=1e-3)


def test_the_divergence_is_estimated_without_bias() -> None:
    random = np.random.default_rng(3)
    mu, q = (random.dirichlet(np.ones(6)) for _ in range(2))
    d = np.log(q) - np.log(mu)
    exact = np.sum(mu * -d)
    assert np.sum(mu * (np.expm1(d) - d)) == pytest.approx(exact)
    tokens = random.choice(6, 200_000, p=mu)
    assert mismatch([gaps(d[tokens])])["mismatch/kl"] == pytest.approx(exact, rel=0.05)


def test_engines_that_compute_alike_have_no_mismatch() -> None:
    found = mismatch([gaps([0.0] * 5, [0.0] * 2)])
    assert found == {
        "mismatch/kl": 0,
        "mismatch/p99": 0,
        "mismatch/error": 1,
        "mismatch/ess": 1,
    }


def test_the_responses_that_are_effective_are_counted() -> None:
    found = mismatch([gaps([0.0], [0.0], [-60.0], [-60.0])])
    assert found["mismatch/ess"] == pytest.approx(0.5)


def test_one_response_is_effective_whatever_its_gaps() -> None:
    assert mismatch([gaps([3.0, -9.0])])["mismatch/ess"] == 1


@pytest.mark.parametrize("size", [90.0, -90.0, 1e4, -1e4])
def test_gaps_beyond_all_bounds_give_finite_metrics(size: float) -> None:
    found = mismatch([gaps([size] * 40, [0.0])])
    assert all(map(math.isfinite, found.values()))
    assert found["mismatch/error"] <= math.exp(MAX_LOG_RATIO)


@pytest.mark.parametrize("ranks", [[], [None], [None, None]])
def test_without_a_fresh_token_there_is_no_metric(ranks: list[None]) -> None:
    assert mismatch(ranks) == {}


def test_ranks_with_rows_of_their_own_count_all_their_responses() -> None:
    responses = drawn(4, 3, 5, 2)
    found = mismatch([gaps(*responses[:2]), None, gaps(responses[2])])
    assert found == pytest.approx(mismatch([gaps(*responses)]), rel=1e-12)


def test_a_response_in_the_shares_of_two_ranks_is_one() -> None:
    first, second, third = drawn(5, 4, 6, 3)
    shares = [
        Gaps(np.array([*first, *second[:2]], np.float32), np.array([0] * 4 + [4] * 2)),
        Gaps(np.array(second[2:], np.float32), np.array([4] * 4)),
        gaps(third),
        None,
    ]
    expected = mismatch([gaps(first, second, third)])
    assert mismatch(shares, sharing=2) == pytest.approx(expected, rel=1e-12)
    assert mismatch(shares)["mismatch/ess"] != pytest.approx(expected["mismatch/ess"])


def of_versions(sample: Sample, *versions: int) -> Sample:
    """The sample with its first tokens of these versions, one each, and the rest of the last."""
    length = len(sample.rollout.response_ids)
    ends = [*range(1, len(versions)), length]
    starts = [0, *ends[:-1]]
    spans = tuple(map(VersionSpan, versions, starts, ends))
    return replace(sample, rollout=replace(sample.rollout, version_spans=spans))


def batch(*versions: tuple[int, ...]) -> list[Sample]:
    made = [random_sample(index, size, k=6) for index, size in enumerate(SIZES)]
    return [of_versions(one, *own) for one, own in zip(made, versions, strict=True)]


def expected_of(made: Learner, samples: Sequence[Sample]) -> dict[str, float]:
    """The metrics, from the model's own logits in float64."""
    model = made.model.double()
    responses = []
    for sample in samples:
        rollout: Rollout = sample.rollout
        ids = torch.from_numpy(np.concatenate([rollout.prompt.token_ids, rollout.continuation]))
        with torch.no_grad():
            log_q = model(ids[None].long()).logits[0, :-1].log_softmax(-1)
        start = len(rollout.prompt.token_ids)
        chosen = log_q[start - 1 :].gather(-1, ids[start:, None].long())[:, 0].numpy()
        responses.append((chosen - rollout.rollout_logprobs.astype(np.float64)).tolist())
    model.float()
    return oracle(responses)


def metrics_of(made: Learner, samples: Sequence[Sample]) -> dict[str, float]:
    found = made.train_batch(list(samples)).metrics
    return {key: value for key, value in found.items() if key.startswith("mismatch/")}


@pytest.mark.parametrize("budget", [1, 12, 10**6])
def test_only_responses_of_the_trained_version_alone_are_measured(budget: int) -> None:
    samples = batch((3,), (3,), (2, 3), (2,))
    made = learner(tokens_per_micro_batch=budget)
    made.version = 3
    expected = expected_of(made, samples[:2])
    assert metrics_of(made, samples) == pytest.approx(expected, rel=1e-4)


def test_a_response_with_a_token_of_another_version_is_not_measured() -> None:
    made = learner()
    made.version = 3
    assert metrics_of(made, batch((2, 3), (2,), (2, 3), (1, 2))) == {}


def test_the_second_step_of_a_version_measures_nothing() -> None:
    samples, made = batch((0,), (0,), (0,), (0,)), learner()
    assert metrics_of(made, samples).keys() == KEYS
    assert metrics_of(made, samples) == {}


def test_a_step_that_changed_nothing_leaves_samples_fresh() -> None:
    samples, made = batch((0,), (0,), (0,), (0,)), learner(on_nonfinite="skip")
    wrong = batch((0,), (0,), (0,), (0,))
    wrong[0].scores.logprobs[0, 0] = np.nan
    assert made.train_batch(wrong).skipped
    assert metrics_of(made, samples).keys() == KEYS


def test_a_supervised_step_changes_the_weights_of_its_version() -> None:
    samples, made = batch((0,), (0,), (0,), (0,)), learner()
    made.supervise(samples, 1e-3)
    assert metrics_of(made, samples) == {}


def test_probabilities_that_are_not_the_students_are_not_compared() -> None:
    made = learner()
    made.comparable = False
    assert metrics_of(made, batch((0,), (0,), (0,), (0,))) == {}


def test_responses_of_several_micro_batches_have_separate_numbers() -> None:
    tokens = pack([random_sample(0, 2), random_sample(1, 1)], version=0).tokens
    values: dict[str, Any] = {LOG_RATIO: torch.tensor([1.0, 2.0, 3.0])}
    parts = [FreshTokens.of(number, tokens, values) for number in range(2)]
    found = gaps_of([one for one in parts if one is not None])
    assert found is not None
    assert len(set(found.responses.tolist())) == 4
    assert found.values.tolist() == [1, 2, 3, 1, 2, 3]


def of_ranks(
    context: int, spec: RankSpec | None = None, rank_group: RankGroup = SINGLE_RANK
) -> dict[str, float]:
    mesh = None if spec is None else join_mesh(spec, CPU)
    made = Learner(rank_of_mesh(context if spec else 1, mesh), rank_group=rank_group)
    # of the longest row, which is computed first, a rank that has its first half has no response
    prompt_first = random_sample(9, 4, k=6, prompt=20)
    return metrics_of(made, [prompt_first, *batch((0,), (0,), (0,), (0,))])


def rank_of_mesh(context: int, mesh: Any) -> Rank:
    train = TrainConfig(tokens_per_micro_batch=12, context_parallel=context)
    objective = build_objective(ForwardKLConfig())
    return Rank(PlacedStudent(tiny_model(), objective, train, CPU, mesh=mesh))


@pytest.mark.slow
@pytest.mark.parametrize("context", [1, 2])
def test_two_ranks_measure_what_one_does(context: int) -> None:
    def lead(spec: RankSpec | None, rank_group: RankGroup) -> Any:
        return of_ranks(context, spec, rank_group)

    def follow(spec: RankSpec) -> Follower:
        return Follower(rank_of_mesh(context, join_mesh(spec, CPU)))

    found = in_processes(2, lead, follow, 120)
    assert found.keys() == KEYS
    assert found == pytest.approx(of_ranks(1), rel=1e-4)
