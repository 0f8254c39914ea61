"""The simulator against the real pipeline in virtual time: same rules, same throughput."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

import pytest

from async_opd.tools.plan.setting import Setting
from async_opd.tools.plan.sim.simulation import simulate
from tests.tools.plan.settings import setting, teacher
from tests.tools.plan.virtual import Seen, run_pipeline
from tests.world.clock import run_virtually

pytestmark = pytest.mark.long

BALANCED = setting(
    replicas=4,
    slots=8,
    sigma=1.0,
    steps=80,
    batch_size=32,
    sync_steps=4,
    staleness_threshold=1.0,
    teachers=(teacher("a", 2, 8, 0.05, 2000.0, 1.0),),
    train_tokens_per_s=4000.0,
    snapshot_s=0.2,
    sync_s=0.2,
)
"""Each pool alone could do about 30 samples/s."""

CASES = {
    "balanced": BALANCED,
    "half a version ahead": replace(BALANCED, staleness_threshold=0.5),
    "on-policy": replace(BALANCED, staleness_threshold=0.0, sync_steps=1, batch_size=128, steps=24),
    "rolling": replace(BALANCED, rolling=True),
    "groups of four": replace(BALANCED, rollout=replace(BALANCED.rollout, n=4)),
    "two teachers": replace(
        BALANCED,
        teachers=(teacher("a", 1, 8, 0.05, 2000.0, 0.5), teacher("b", 1, 8, 0.02, 3000.0, 0.5)),
    ),
    "slow trainer": replace(BALANCED, train=BALANCED.train.model_copy(update={"overhead_s": 1.0})),
    "narrow queue": replace(BALANCED, queue_samples=32),
}
RUNS = 2


def both(case: Setting) -> tuple[list[Seen], list[Seen]]:
    """(real, simulated), as many of each."""
    real = [run_virtually(run_pipeline(case, run)) for run in range(RUNS)]
    found = [simulate(case, seed=seed) for seed in range(RUNS)]
    return real, [Seen(one.samples_per_s, one.mean_staleness) for one in found]


@pytest.mark.parametrize("name", CASES)
def test_the_simulator_is_as_fast_as_the_pipeline(name: str) -> None:
    real, found = both(CASES[name])
    assert fmean(one.samples_per_s for one in found) == pytest.approx(
        fmean(one.samples_per_s for one in real), rel=0.05
    )
    assert fmean(one.mean_staleness for one in found) == pytest.approx(
        fmean(one.mean_staleness for one in real), abs=0.12
    )


def test_with_lengths_that_do_not_vary_both_agree_closely() -> None:
    case = replace(BALANCED, lengths=replace(BALANCED.lengths, sigma=0.0))
    real, found = both(case)
    assert found[0].samples_per_s == pytest.approx(real[0].samples_per_s, rel=0.02)
