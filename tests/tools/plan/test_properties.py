"""What holds for every setting: nothing is lost or trained twice, the budget holds."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.tools.plan.advice import enlarged, shrunk
from async_opd.tools.plan.setting import Setting
from async_opd.tools.plan.sim.simulation import SimulatedRun, predict, simulate
from tests.properties import examples
from tests.tools.plan.settings import rollouts, setting, teacher

pytestmark = pytest.mark.slow


@st.composite
def cases(draw: st.DrawFn) -> Setting:
    n = draw(st.sampled_from([1, 2, 4]))
    count = draw(st.integers(1, 3))
    teachers = tuple(
        teacher(
            str(index),
            draw(st.integers(1, 3)),
            draw(st.integers(1, 8)),
            0.01,
            draw(st.sampled_from([300.0, 3000.0])),
            1 / count,
            draw(st.sampled_from([0.0, 0.3])),
        )
        for index in range(count)
    )
    return setting(
        sigma=draw(st.sampled_from([0.0, 1.0])),
        train_tokens_per_s=draw(st.sampled_from([1000.0, 10_000.0])),
        snapshot_s=draw(st.sampled_from([0.0, 0.2])),
        sync_s=draw(st.sampled_from([0.0, 0.5])),
        rollout=rollouts(
            draw(st.integers(1, 4)),
            draw(st.integers(1, 9)),
            n,
            in_flight=draw(st.integers(1, 10)),
            per_request=0.001,
            turnaround_s=draw(st.sampled_from([0.0, 0.3])),
        ),
        teachers=teachers,
        steps=draw(st.integers(1, 9)),
        batch_size=n * draw(st.integers(1, 4)),
        sync_steps=draw(st.integers(1, 3)),
        staleness_threshold=draw(st.sampled_from([0.0, 0.3, 1.0, 2.5])),
        on_sync=draw(st.sampled_from(["keep", "finish"])),
        rolling=draw(st.booleans()),
        max_version_lag=draw(st.sampled_from([None, 0, 1])),
        whole_groups=draw(st.booleans()),
        queue_samples=draw(st.sampled_from([16, 1000])),
        evaluation_every=draw(st.integers(0, 2)),
        evaluation_s=0.4,
    )


def trained(world: SimulatedRun) -> list[tuple[int, int]]:
    """Runs it; (sample, its staleness) in the order of training."""
    seen: list[tuple[int, int]] = []
    train = world.training._train

    def watched(samples: list[int]) -> None:
        oldest = world.population.oldest
        seen.extend((sample, world.training.version - oldest[sample]) for sample in samples)
        train(samples)

    world.training._train = watched  # type: ignore[method-assign]
    world.run()
    return seen


@examples(150)
@given(case=cases())
def test_every_admitted_sample_is_trained_once_and_the_run_ends(case: Setting) -> None:
    seen = trained(SimulatedRun(case, seed=0, endless=False))
    assert Counter(sample for sample, _ in seen) == Counter(range(case.steps * case.batch_size))


@examples(100)
@given(case=cases())
def test_the_budget_bounds_the_samples_of_each_version(case: Setting) -> None:
    case = replace(case, max_version_lag=None, rolling=False)
    world = SimulatedRun(case, seed=0, endless=False)
    trained(world)
    oldest = world.population.oldest[: world.admission.admitted]
    per_version = case.sync_steps * case.batch_size
    for version in set(oldest):
        started = sum(other <= version for other in oldest)
        assert started <= (version + 1 + case.staleness_threshold) * per_version


@examples(100)
@given(case=cases())
def test_the_threshold_bounds_the_mean_staleness(case: Setting) -> None:
    case = replace(case, max_version_lag=None)
    seen = trained(SimulatedRun(case, seed=0, endless=False))
    assert sum(staleness for _, staleness in seen) <= case.staleness_threshold * len(seen)


@examples(100)
@given(case=cases())
def test_a_version_trains_few_samples_of_older_versions(case: Setting) -> None:
    case = replace(case, max_version_lag=None)
    seen = trained(SimulatedRun(case, seed=0, endless=False))
    per_version = case.sync_steps * case.batch_size
    for first in range(0, len(seen), per_version):
        stale = sum(staleness > 0 for _, staleness in seen[first : first + per_version])
        assert stale <= case.staleness_threshold * per_version


@examples(60)
@given(case=cases(), lag=st.integers(0, 2))
def test_nothing_staler_than_the_hard_bound_is_trained(case: Setting, lag: int) -> None:
    seen = trained(SimulatedRun(replace(case, max_version_lag=lag), seed=0, endless=False))
    assert max(staleness for _, staleness in seen) <= lag


@examples(60)
@given(case=cases())
def test_on_policy_nothing_is_stale(case: Setting) -> None:
    case = replace(case, staleness_threshold=0.0, sync_steps=1)
    assert all(
        staleness == 0 for _, staleness in trained(SimulatedRun(case, seed=0, endless=False))
    )


@examples(40)
@given(case=cases(), seed=st.integers(0, 9))
def test_the_same_seed_predicts_the_same(case: Setting, seed: int) -> None:
    assert simulate(case, seed=seed) == simulate(case, seed=seed)


def test_other_seeds_draw_other_lengths() -> None:
    assert simulate(setting(sigma=1.0), seed=1) != simulate(setting(sigma=1.0), seed=2)


@examples(60)
@given(case=cases())
def test_shares_of_time_are_shares(case: Setting) -> None:
    for pool in simulate(case).pools:
        assert -1e-6 <= pool.busy <= 1 + 1e-6
        assert all(-1e-6 <= share <= 1 + 1e-6 for share in pool.waits.values())


def test_a_larger_threshold_costs_no_throughput() -> None:
    case = setting(sigma=1.0, n=4, steps=300, train_tokens_per_s=5000.0, sync_s=0.5)
    rates = [
        simulate(replace(case, staleness_threshold=s), endless=True).samples_per_s
        for s in (0.0, 0.25, 0.5, 1.0, 2.0)
    ]
    assert all(more > 0.98 * less for less, more in pairwise(rates))


def test_a_smaller_scale_predicts_the_same() -> None:
    large = setting(
        replicas=300,
        slots=8,
        sigma=1.0,
        batch_size=2400,
        steps=24,
        teachers=(teacher("a", 40, 8, 0.05, 20_000.0),),
        train_tokens_per_s=400_000.0,
        sync_s=0.5,
    )
    small, factor = shrunk(large)
    found = enlarged(simulate(small, endless=True), large, factor)
    assert small.rollout.replicas == 128
    whole = simulate(large, endless=True)
    assert found.samples_per_s == pytest.approx(whole.samples_per_s, rel=0.03)
    assert found.pools[1].busy == pytest.approx(whole.pools[1].busy, abs=0.05)


def test_a_long_run_goes_on_as_its_first_part() -> None:
    case = replace(setting(train_tokens_per_s=1000.0), steps=20_000)
    assert predict(case).seconds == pytest.approx(20_000 * 32 * 120 / 1000, rel=0.02)
