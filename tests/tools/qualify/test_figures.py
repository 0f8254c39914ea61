"""The figures and the environment of single measurements of ``qualify``, without their work."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.device_defaults import ALLOCATOR
from async_opd.core.distributions import cpu_name
from async_opd.core.errors import ConfigError, Problem, StageError
from async_opd.tools.qualify import harness
from async_opd.tools.qualify.measurements import engines, families, measuring, runs
from async_opd.tools.qualify.measurements.measuring import Report, Skip

pytestmark = pytest.mark.slow
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SECRET = "sk-" + "a1b2c3d4" * 4
((KEY, OURS),) = ALLOCATOR["cuda"].items()


def test_packed_logits_that_differ_on_the_device_are_an_error_not_a_skip(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def differs(*_: object) -> None:
        raise StageError("student", "packed logits differ", "train another student")

    monkeypatch.setattr(families, "check_placed", differs)
    with pytest.raises(StageError, match="packed logits differ"):
        families.measure("Qwen2", "auto", CPU)


@pytest.mark.parametrize(
    ("values", "largest"), [([1.0, 3.0], 3.0), ([], None), ([0.0, math.nan, 2.0], math.nan)]
)
def test_the_largest_value_is_nan_where_one_is(values: list[float], largest: float | None) -> None:
    found = runs.largest(values)
    assert found == largest or (math.isnan(largest or 0) and math.isnan(found or 0))


def test_any_distance_beyond_a_limit_of_zero_is_an_infinite_share() -> None:
    assert runs.shares([0.0, 1e-6, 1.0], [0.0, 0.0, 4.0]) == [0.0, math.inf, 0.25]


def refused(*_: object, **__: object) -> None:
    raise ConfigError([Problem("config", "rollout", "is refused", "change it")])


@pytest.mark.parametrize(
    ("name", "error"), [("shared memory", ConfigError), ("quantized: fp8_per_channel", Skip)]
)
def test_a_refused_config_is_a_skip_for_schemes_of_quantization_only(
    name: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "distil", refused)
    monkeypatch.setattr(runs, "mixture", lambda *_: "mixture")
    with pytest.raises(error, match="is refused"):
        runs.run(name, CPU)


def engine_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "saved", lambda *_: "model")
    monkeypatch.setattr(engines, "engine_env", lambda *_, **__: {})
    monkeypatch.setattr(engines, "finished", lambda _: {})
    engines.main(Report(CUDA), "sleep")


@pytest.mark.parametrize("row", [engine_row, lambda _: runs.main(Report(CUDA))])
@pytest.mark.parametrize(("given", "left"), [(OURS, None), ("max_split_size_mb:64",) * 2])
def test_engines_get_the_users_settings_of_the_allocator_and_not_the_trainers(
    row: Any, given: str, left: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(KEY, given)
    row(monkeypatch)
    assert os.environ.get(KEY) == left


def test_an_engine_answers_as_before_if_its_first_tokens_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rounds = iter([[[1, 2], [3, 4], [5, 6], [7, 8]], [[1, 9], [3, 4], [5, 5], [9, 8]]])

    class Engine:
        def __init__(self, *_: object) -> None:
            self.replica = self

        async def answers(self) -> list[list[int]]:
            return next(rounds)

        async def ready(self) -> None: ...

        sleep = wake = shutdown = ready

    used = iter([[9.0, 5.0], [79.0, 75.0], [10.0, 7.0], [10.0, 7.5]])
    monkeypatch.setattr(engines, "Engine", Engine)
    monkeypatch.setattr(engines, "used_gib", lambda: next(used))
    found = engines.finished(lambda: engines.sleep("model", "cuda", 2))
    assert found["same_first"] == 0.75
    assert (found["awake_gib"], found["asleep_gib"]) == (70.0, 2.5)  # of the fuller GPU


def skipping() -> dict[str, Any]:
    raise Skip(f"no access with {SECRET}")


def exhausting() -> dict[str, Any]:
    raise torch.OutOfMemoryError(f"no memory with {SECRET}")


def noting() -> dict[str, Any]:
    return {"longest": f"kernel of {SECRET}"}


@pytest.mark.parametrize("work", [skipping, exhausting, noting])
def test_a_secret_in_the_texts_of_a_cell_is_redacted(
    work: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    Report(CPU).cell(work, what="it")
    printed = capsys.readouterr().out
    assert " with <hidden>" in printed or " of <hidden>" in printed
    assert SECRET not in printed


def test_a_cell_that_may_take_longer_than_is_left_is_not_begun() -> None:
    report = Report(CPU, seconds=600.0, longest=601.0)
    report.cell(lambda: {"x": 1}, what="it")
    assert report.cells == [{"what": "it", "not_reached": "the row has 600 seconds"}]


def test_a_machine_without_a_gpu_is_named_by_its_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert measuring.machine()["device_name"] == cpu_name()


def test_a_cell_is_found_between_other_texts_of_its_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    cells = [{"x": 1}, {"x": 2}]
    first, second = (json.dumps({"cell": cell}) for cell in cells)
    log.write_text(f'loading: 50%{first}\n{second} done\n{{"cell": cut\n')
    assert list(harness.parsed(log, "cell")) == cells
