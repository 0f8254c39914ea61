"""Runs with a fault made on purpose, on the real pipeline in virtual time: the verdict names it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.files.lines import MetricsRow
from async_opd.tools.plan.setting import Lengths, Setting
from async_opd.tools.report.pool_times import pool_times
from async_opd.tools.report.recorded_run import RecordedRun, read_recorded_run
from async_opd.tools.report.verdict import Verdict, judge
from tests.tools.plan.runs import write_run
from tests.tools.plan.settings import LENGTH, PROMPT, rollouts, setting, teacher
from tests.tools.report.simulated import record

TOKENS = LENGTH + PROMPT
HEADROOM = 1.1
"""Each pool of a balanced setting could do this much more than the trainer."""


def balanced(replicas: int, slots: int, batch: int) -> Setting:
    """Rollout and two teachers have ``HEADROOM`` over the trainer; training is four steps ahead."""
    rate = replicas * slots / (0.01 * LENGTH)  # samples/s of rollout
    scored = rate / 2 * TOKENS / 2  # tokens/s of a replica, of two a teacher
    return setting(
        sigma=0.5,
        steps=36,
        batch_size=batch,
        sync_steps=2,
        staleness_threshold=2.0,
        rollout=rollouts(replicas, slots),
        teachers=(teacher("a", 2, 8, 0.0, scored, 0.5), teacher("b", 2, 8, 0.0, scored, 0.5)),
        train_tokens_per_s=rate * TOKENS / HEADROOM,
        snapshot_s=0.02 * batch / rate,
        sync_s=0.02 * batch / rate,
    )


def step_s(one: Setting) -> float:
    """Seconds in which the balanced trainer trains a batch."""
    return one.train.seconds(one.batch_size * TOKENS, 1)


def trained(one: Setting, **changes: float) -> Setting:
    """The setting with another trainer."""
    return replace(one, train=one.train.model_copy(update=changes))


def slow_rollout(one: Setting, factor: float) -> Setting:
    speed = one.rollout.speed.model_copy(update={"step_s": one.rollout.speed.step_s * factor})
    return replace(one, rollout=replace(one.rollout, speed=speed))


def slow_teacher(one: Setting, factor: float) -> Setting:
    a, b = one.teachers
    speed = a.speed.model_copy(update={"tokens_per_s": a.speed.tokens_per_s / factor})
    return replace(one, teachers=(replace(a, speed=speed), b))


def slow_trainer(one: Setting, factor: float) -> Setting:
    return trained(one, tokens_per_s=one.train.tokens_per_s / factor)


def slow_sync(one: Setting, factor: float) -> Setting:
    return trained(one, sync_s=factor * one.sync_steps * step_s(one) / 2)


def long_tail(one: Setting, factor: float) -> Setting:
    """Fast pools: what is left to wait for are the longest of each batch's responses."""
    tail = Lengths(LENGTH, 1.4 + factor / 10, 40 * LENGTH)
    fast = trained(one, tokens_per_s=3 * one.train.tokens_per_s)
    teachers = tuple(
        replace(t, speed=t.speed.model_copy(update={"tokens_per_s": 3 * t.speed.tokens_per_s}))
        for t in one.teachers
    )
    fast = replace(fast, lengths=tail, teachers=teachers, steps=60)
    return replace(fast, staleness_threshold=0.5, sync_steps=1)


SIZES = {"small": (2, 8, 16), "wide": (3, 16, 48)}
FACTORS = {"twice": 2.0, "four times": 4.0}


def verdict_of(folder: Path, one: Setting, seed: int, grader: Any = None) -> Verdict:
    return judge(read_recorded_run(record(folder / "run", one, seed, grader)))


FAULTS: dict[str, tuple[Any, str, str, set[str]]] = {
    "rollout": (slow_rollout, "pool", "rollout", {"train"}),
    "teacher": (slow_teacher, "pool", "teacher/a", {"train", "rollout"}),
    "trainer": (slow_trainer, "pool", "train", {"rollout"}),
    "weight sync": (slow_sync, "sync", "", set()),
    "lengths with a long tail": (long_tail, "lengths", "", set()),
}


@pytest.mark.slow
@pytest.mark.parametrize(("size", "factor"), [("small", "four times"), ("wide", "twice")])
class TestAFaultMadeOnPurposeIsNamed:
    """Each of the six, strong in a small run and weak in a wider one, with other lengths."""

    @pytest.mark.parametrize("fault", FAULTS)
    def test_a_slow_part(self, tmp_path: Path, size: str, factor: str, fault: str) -> None:
        made, kind, pool, starved = FAULTS[fault]
        seed = 1 + list(FAULTS).index(fault)
        found = verdict_of(tmp_path, made(balanced(*SIZES[size]), FACTORS[factor]), seed)
        assert found.kind == kind, found.headline
        assert not pool or found.pool == pool, found.headline
        assert not starved or starved & set(found.starved)

    def test_a_slow_grader(self, tmp_path: Path, size: str, factor: str) -> None:
        one = balanced(*SIZES[size])
        one = replace(one, rollout=replace(one.rollout, n=2))  # rewards are compared in groups
        rate = one.batch_size / step_s(one)
        seconds = FACTORS[factor] * 4 * one.rollout.replicas / rate
        found = verdict_of(tmp_path, one, 6, (seconds, 4))
        assert found.kind == "grader", found.headline


@pytest.mark.slow
@pytest.mark.parametrize(("size", "seed"), [("small", 7), ("wide", 8)])
def test_a_balanced_run_is_healthy(tmp_path: Path, size: str, seed: int) -> None:
    found = verdict_of(tmp_path, balanced(*SIZES[size]), seed)
    assert found.kind == "healthy", (found.headline, found.evidence)


@pytest.mark.slow
def test_pools_that_take_turns_have_too_small_a_budget(tmp_path: Path) -> None:
    one = replace(balanced(*SIZES["small"]), staleness_threshold=0.0, sync_steps=1)
    one = replace(one, lengths=replace(one.lengths, sigma=0.2))
    found = verdict_of(tmp_path, one, 9)
    assert found.kind == "budget", (found.headline, found.evidence)


def test_a_few_steps_are_not_judged_and_have_the_evidence_that_there_is(tmp_path: Path) -> None:
    found = judge(read_recorded_run(write_run(tmp_path / "run", steps=7)))
    assert found.kind == "unknown"
    assert any(line.startswith("rollout computes") for line in found.evidence)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return read_recorded_run(write_run(tmp_path_factory.mktemp("runs") / "run"))


def test_pools_that_take_turns_on_the_same_gpus_are_not_starved(run: RecordedRun) -> None:
    turns = {"rollout/request_s": 0.55 * 16, "rollout/wait_gpu_s": 0.4, "rollout/paused_s": 0.0}
    turns |= {"train/busy_s": 0.4, "train/wait_gpu_s": 0.55, "train/wait_s": 0.02}
    rows = [replace(row, values={**row.values, **turns}) for row in run.rows]
    assert judge(replace(run, rows=tuple(rows))).kind == "healthy"


def test_an_evaluation_beside_the_rollouts_is_no_time_for_which_they_wait(run: RecordedRun) -> None:
    busy = {"rollout/request_s": 0.95 * 16, "rollout/paused_s": 0.0, "train/busy_s": 0.95}
    rows = [replace(row, values={**row.values, **busy}) for row in run.steps]
    evaluated = MetricsRow(30, rows[-1].time, {"eval/seconds": 40.0, "eval/maths/accuracy": 0.5})
    found = judge(replace(run, rows=(*rows, evaluated)))
    assert found.kind == "healthy", found.headline
    assert found.times[0].computing == pytest.approx(0.95)
    assert not any("evaluation" in line for line in found.evidence)


AMOUNTS = st.floats(0, 100)
KEYS = (
    "rollout/request_s",
    "rollout/paused_s",
    "rollout/limit",
    "teacher/a/busy_s",
    "train/busy_s",
    "train/wait_s",
    "sync/trainer_wait_s",
    "rollout/wait_gpu_s",
    "train/wait_gpu_s",
)


@given(
    rows=st.lists(
        st.tuples(st.floats(0.1, 100), st.dictionaries(st.sampled_from(KEYS), AMOUNTS)),
        min_size=1,
        max_size=4,
    )
)
def test_the_shares_of_a_pools_time_add_up_to_one(
    run: RecordedRun, rows: list[tuple[float, dict[str, float]]]
) -> None:
    steps = [
        MetricsRow(index, 0.0, {**values, "perf/step_s": seconds})
        for index, (seconds, values) in enumerate(rows)
    ]
    for pool in pool_times(run, steps):
        assert sum(pool.shares.values()) == pytest.approx(1)
        assert all(0 <= share <= 1 for share in pool.shares.values())
