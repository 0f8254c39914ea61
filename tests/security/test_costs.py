"""Work that a stranger's file causes grows with the file, and not with its square.

The sizes are such that the work of a square takes hours.
"""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from async_opd.config.load import load_config
from async_opd.config.secrets import names_secret
from async_opd.core.errors import ConfigError
from async_opd.files.foreign import ForeignPath
from async_opd.files.kept_steps import KEPT, kept_name
from async_opd.files.lines import MetricsRow
from async_opd.tools.importing import shell
from async_opd.tools.importing.draft import Budget
from async_opd.tools.plan.inputs import setting_of
from async_opd.tools.plan.sim.simulation import predict
from async_opd.tools.replay.kept_run import replay_plan
from async_opd.tools.report.recorded_run import RecordedRun
from async_opd.tools.report.run_charts import evaluation_lines
from tests.fuzz.command import bounded
from tests.tools.plan.settings import rollouts, setting
from tests.tools.replay import kept
from tests.world.config import run_config as config

pytestmark = pytest.mark.slow

MANY = 400_000


@pytest.mark.parametrize(("name", "secret"), [("_" * MANY, False), ("a_sql" * MANY, False)])
def test_a_long_key_is_compared_with_names_of_secrets(name: str, secret: bool) -> None:
    with bounded():
        assert names_secret(name) == secret


@pytest.mark.parametrize("name", ["mysql_pass", "db.postgresqlpass", "SQL_PASS", "sqlPass"])
def test_the_password_of_a_database_is_a_secret(name: str) -> None:
    assert names_secret(name)


def recorded(*rows: MetricsRow) -> RecordedRun:
    return RecordedRun(ForeignPath(Path()), config(), rows, (), None, (), ())


def test_a_row_with_many_sources_becomes_as_many_lines() -> None:
    values = {f"eval/{at}/accuracy": 0.5 for at in range(MANY // 4)}
    with bounded():
        found = list(evaluation_lines(recorded(MetricsRow(1, 1.0, values))))
    assert len(found) == len(values)


def test_rows_with_a_source_each_become_as_many_lines() -> None:
    rows = [MetricsRow(at, 1.0, {f"eval/{at}/accuracy": 0.5}) for at in range(MANY // 4)]
    with bounded():
        found = list(evaluation_lines(recorded(*rows)))
    assert len(found) == len(rows)


def test_the_error_of_a_line_is_that_of_its_sources_mean() -> None:
    values = {"eval/a/accuracy": 0.5, "eval/a/mean@4_stderr": 0.1, "eval/b/accuracy": 0.25}
    lines = list(evaluation_lines(recorded(MetricsRow(3, 1.0, values))))
    assert [(one.name, one.errors) for one in lines] == [("a", [0.1]), ("b", None)]


def test_the_many_values_of_a_flag_are_one_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shell, "value_of", lambda text: text)
    with bounded():
        found = shell.flags(["--x", *["a"] * MANY], Budget())
    assert len(found["x"]) == MANY


@pytest.mark.parametrize(
    "change",
    [
        {"batch_size": 10**7, "steps": 10**7},
        {"sync_steps": 10**7, "steps": 10**9},
        {"staleness_threshold": 1e12, "steps": 100, "queue_samples": 10**12},
        {"rollout": rollouts(replicas=1000, in_flight=10**9), "staleness_threshold": 1e9},
    ],
)
def test_a_setting_of_too_many_samples_is_not_simulated(change: dict[str, Any]) -> None:
    with bounded(), pytest.raises(ConfigError, match="at most 2000000 are simulated"):
        predict(replace(setting(), **change))


@pytest.mark.parametrize(
    ("key", "value"), [("rollout.replicas", 10**8), ("rollout.n", 10**9), ("train.ranks", 10**8)]
)
def test_a_cluster_that_no_machine_has_is_not_simulated(key: str, value: int) -> None:
    plan = "{rollout: {step_s: 0.01}, teachers: {sort: {tokens_per_s: 1}}, "
    plan += "train: {tokens_per_s: 1}, prompt_tokens: 1, response_tokens: 1}"
    tree = config().model_dump(mode="json", by_alias=True)
    found = load_config(
        tree,
        [
            f"{key}={value}",
            f"train.batch_size={value}",
            f"queue.max_samples={value}",
            f"plan={plan}",
        ],
    )
    assert found.plan is not None
    with bounded(), pytest.raises(ConfigError, match=f"{key}: found {value}, expected at most"):
        setting_of(found, found.plan, "config.yaml")


@pytest.mark.parametrize("ranks", [10**7, int("9" * 200)])
def test_the_number_of_ranks_in_the_name_of_a_kept_step_takes_no_memory(
    tmp_path: Path, ranks: int
) -> None:
    folder = tmp_path / "run"
    kept.begin(kept.config_of(folder), folder)
    (folder / KEPT).mkdir(exist_ok=True)

    def refused() -> None:
        with pytest.raises(ConfigError, match="no checkpoint before step 1 is left"):
            replay_plan(folder, 1)

    (folder / KEPT / kept_name(1, 0, 2)).touch()
    refused()  # the modules are imported then
    (folder / KEPT / kept_name(1, 0, 2)).rename(folder / KEPT / kept_name(1, 0, ranks))
    tracemalloc.start()
    refused()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 64 << 20
