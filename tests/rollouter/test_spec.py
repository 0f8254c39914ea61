"""Seeds of rollouts."""

from __future__ import annotations

from async_opd.core.stages import SamplingSpec
from rollouter.spec import StudentEngineSpec


def spec(seed: int | None) -> StudentEngineSpec:
    return StudentEngineSpec("student/0", {}, SamplingSpec(8, 1.0, 1.0, 2), (2,), "gloo", seed=seed)


def test_without_a_seed_rollouts_have_none() -> None:
    assert spec(None).seed_of("p/0") is None


def test_a_rollouts_seed_depends_on_the_runs_seed_and_its_uid_only() -> None:
    assert spec(1).seed_of("p/0") == spec(1).seed_of("p/0") == 3727694994002388282
    assert len({spec(1).seed_of("p/0"), spec(2).seed_of("p/0"), spec(1).seed_of("p/1")}) == 3
