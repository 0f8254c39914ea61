"""The quickstart with engines of low precision: runs end, and their mismatch is measured."""

from __future__ import annotations

import pytest

from tests.cluster.test_run import ONE_TEACHER, Run, Running

pytestmark = [pytest.mark.engine, pytest.mark.long]

STEPS, SYNC = 9, 3
GIVEN = (
    f"train.steps={STEPS}",
    "train.batch_size=32",
    f"async={{staleness_threshold: 0, sync_steps: {SYNC}}}",
    "sync.verify_every=0",
    "eval={every: 0, max_prompts: 16, teachers: false}",
    ONE_TEACHER,
)
PRECISIONS = {
    "float32": "rollout.engine.dtype=float32",
    "fp8": "rollout.engine.quantization=fp8_per_channel",
    "int4": "sync.fake_quantization=int4_group32",
}
KEYS = {"mismatch/kl", "mismatch/p99", "mismatch/error", "mismatch/ess"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("runs")
    return {
        name: Running(folder / name, *GIVEN, override).end()
        for name, override in PRECISIONS.items()
    }


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_run_of_any_precision_completes(runs: dict[str, Run], name: str) -> None:
    assert runs[name].ended(0, "completed"), runs[name].output


@pytest.mark.parametrize("name", PRECISIONS)
def test_the_first_step_of_each_version_measures_the_mismatch(
    runs: dict[str, Run], name: str
) -> None:
    measured = {row["step"] for row in runs[name].metrics if row.keys() >= KEYS}
    assert measured == set(range(1, STEPS + 1, SYNC))
    assert not any(KEYS & row.keys() for row in runs[name].metrics if row["step"] not in measured)


def test_engines_of_the_trainers_dtype_have_no_mismatch(runs: dict[str, Run]) -> None:
    assert max(runs["float32"].values("mismatch/error")) < 1 + 1e-4
    assert min(runs["float32"].values("mismatch/ess")) > 1 - 1e-6


def test_low_precision_is_seen_at_once(
    runs: dict[str, Run],
) -> None:
    largest = max(runs["float32"].values("mismatch/kl"))
    assert min(runs["int4"].values("mismatch/kl")) > 100 * largest
    assert min(runs["fp8"].values("mismatch/kl")) > 100 * largest
    for name in ("fp8", "int4"):
        assert 1 < max(runs[name].values("mismatch/error")) < 1.5
