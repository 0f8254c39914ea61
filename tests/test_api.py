"""The Python API: its public names, what callbacks are told, and how their errors end a run."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import async_opd
from async_opd.api import Callback, CallbackSink
from async_opd.cli import main
from async_opd.config.load import load_config
from async_opd.core.errors import ConfigError
from async_opd.job import Job
from async_opd.prepare import prepare
from tests.checks.inputs import EXAMPLE, FEW
from tests.world.training import FakeTraining

ROOT = Path(__file__).parents[1]
METHODS = ["on_checkpoint", "on_end", "on_evaluation", "on_row"]


class Recorded(async_opd.Callback):  # type: ignore[name-defined, misc]
    """Remembers its calls, and fails in the one it is told to."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails
        self.calls: list[tuple[Any, ...]] = []

    def _call(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self.fails:
            raise KeyError("no such thing")

    def on_row(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("on_row", step, dict(metrics))

    def on_evaluation(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call("on_evaluation", step, dict(metrics))

    def on_checkpoint(self, step: int, folder: Path) -> None:
        self._call("on_checkpoint", step, folder)

    def on_end(self, summary: Any) -> None:
        self._call("on_end", summary.status)


async def trained(training: FakeTraining) -> None:
    """Two steps, a checkpoint after the first, and an evaluation."""
    job: Job = training.job
    job.log.log(1, {"loss/total": 0.5})
    job.log.checkpoint(1, Path("step_1"))
    job.log.log(2, {"loss/total": 0.25})
    job.log.log(2, {"eval/sort/accuracy": 1.0})


@pytest.fixture
def overrides(
    tmp_path: Path, distilling: type[FakeTraining], monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    monkeypatch.setattr(distilling, "run", trained)
    quiet = ["log.wandb=off", "log.console=off", "cluster.device=cpu"]
    return [*FEW, *quiet, f"run_dir={json.dumps(str(tmp_path / 'run'))}"]


def test_the_public_names_are_these() -> None:
    assert async_opd.__all__ == ["Callback", "Summary", "__version__", "distil"]
    assert [str(one) for one in inspect.signature(async_opd.distil).parameters.values()] == [
        "config: 'str | Path | Mapping[str, Any]'",
        "callbacks: 'Sequence[Callback]' = ()",
        "overrides: 'Sequence[str]' = ()",
        "resume: 'bool' = False",
    ]
    assert [name for name in dir(async_opd.Callback) if name.startswith("on_")] == METHODS
    assert not hasattr(async_opd, "no_such_name")


def test_import_async_opd_imports_no_other_package() -> None:
    wanted = ["torch", "ray", "vllm", "transformers", "numpy", "pydantic", "async_opd.api"]
    code = f"import sys, async_opd; print([n for n in {wanted} if n in sys.modules])"
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("mine", "named"), [("trainer.py",) * 2, ("teachers/__init__.py", "teachers")]
)
def test_a_file_of_the_users_with_a_name_of_ours_is_named_and_to_be_renamed(
    mine: str, named: str, tmp_path: Path
) -> None:
    (tmp_path / mine).parent.mkdir(exist_ok=True)
    (tmp_path / mine).touch()
    command = [sys.executable, "-c", "import async_opd"]
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True
    )
    assert f"→ rename {tmp_path / named}, or start" in ended.stderr.decode()


def test_a_distribution_with_a_package_of_our_name_is_to_be_uninstalled(tmp_path: Path) -> None:
    site = tmp_path / "site-packages"
    (site / "trainer").mkdir(parents=True)
    (site / "trainer" / "__init__.py").touch()
    command = [sys.executable, "-c", "import async_opd"]
    path = f"{site}{os.pathsep}{ROOT}"
    ended = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, capture_output=True
    )
    assert "uninstall it (`pip uninstall trainer`)" in ended.stderr.decode()


@pytest.mark.parametrize(("system", "name"), [("darwin", "macOS"), ("win32", "Windows")])
def test_another_operating_system_is_refused_in_one_line(
    system: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "platform", system)
    with pytest.raises(ImportError, match=f"runs on Linux, this is {name}"):
        _ = async_opd.distil
    assert main(["check", str(EXAMPLE)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"this is {name} → use a Linux machine" in line


def test_callbacks_are_told_of_rows_evaluations_checkpoints_and_the_end(
    overrides: list[str],
) -> None:
    callback = Recorded()
    summary = async_opd.distil(EXAMPLE, callbacks=[callback], overrides=overrides)
    assert callback.calls == [
        ("on_row", 1, {"loss/total": 0.5}),
        ("on_checkpoint", 1, Path("step_1")),
        ("on_row", 2, {"loss/total": 0.25}),
        ("on_row", 2, {"eval/sort/accuracy": 1.0}),
        ("on_evaluation", 2, {"eval/sort/accuracy": 1.0}),
        ("on_end", "completed"),
    ]
    assert (summary.status, summary.metrics["loss/total"]) == ("completed", 0.25)
    assert (summary.run_dir / "model").is_dir()


@pytest.mark.parametrize("method", METHODS)
def test_an_error_of_a_callback_ends_the_run_with_its_cause(
    overrides: list[str], method: str, tmp_path: Path
) -> None:
    async_opd.distil(EXAMPLE, callbacks=[Recorded(fails=method)], overrides=overrides)
    written = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert written["status"] == "failed"
    assert "KeyError: 'no such thing'" in written["error"]


def test_an_error_of_a_callback_is_in_the_summary_that_is_returned(overrides: list[str]) -> None:
    summary = async_opd.distil(EXAMPLE, callbacks=[Recorded(fails="on_end")], overrides=overrides)
    assert summary.status == "failed"
    assert "KeyError" in str(summary.error)


def test_a_mapping_is_checked_like_a_file() -> None:
    with pytest.raises(ConfigError, match=r"the config.*stident") as caught:
        async_opd.distil({"stident": {"model": "x"}})
    assert "data: is missing" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "cause"),
    [
        ("tests.losses_of_users:no_such", "AttributeError"),
        ("tests.losses_of_users:wrong_arguments", "does not fit"),
        ("tests.losses_of_users:wrong_shape", "expected values [2] and slopes [2, 3]"),
        ("tests.losses_of_users:wrong_slope", "return the partial derivative by each log q"),
        ("tests.losses_of_users:CONSTANT", "which cannot be called"),
    ],
)
def test_a_loss_that_cannot_work_is_refused_before_anything_starts(
    overrides: list[str], function: str, cause: str, tmp_path: Path
) -> None:
    loss = f"loss={{kind: user, function: '{function}', top_k: 4}}"
    with pytest.raises(ConfigError) as caught:
        async_opd.distil(EXAMPLE, overrides=[*overrides, loss])
    assert cause in str(caught.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("torch_for_gpus")
@pytest.mark.parametrize(
    ("overrides", "gpus", "device"),
    [
        ((), 0, "cpu"),
        ((), 8, "auto"),
        (("cluster.wait_s=60",), 0, "auto"),
        (("cluster.device=cuda",), 0, "cuda"),
    ],
)
def test_a_cluster_to_join_is_asked_whether_it_has_gpus(
    overrides: tuple[str, ...], gpus: int, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_opd.checks.resources.gpus_of_cluster", lambda address, bound: gpus)
    config = load_config(EXAMPLE, ["cluster.address=10.0.0.1:6379", *FEW, *overrides])
    ready = prepare(config, "c.yaml")
    assert ready.config.cluster.device == device
    said = "cluster.device: auto is cpu, since the cluster at 10.0.0.1:6379 has no GPU"
    assert (said in ready.inputs.notes) == (device == "cpu")


SUMMARY: Any = object()


class Ends(Callback):
    """Counts its ends, and fails if it has an error."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.ends = error, 0

    def on_end(self, summary: Any) -> None:
        self.ends += 1
        if self.error is not None:
            raise self.error

    def on_checkpoint(self, step: int, folder: Path) -> None:
        raise KeyError("of a checkpoint")


def test_all_callbacks_are_called_at_the_end_and_the_first_of_their_errors_is_raised() -> None:
    callbacks = [Ends(), Ends(ValueError("first")), Ends(ValueError("second"))]
    sink = CallbackSink(callbacks)
    with pytest.raises(ValueError, match="first"):
        sink.close(SUMMARY)
    assert sink.error == "ValueError: first"
    assert [callback.ends for callback in callbacks] == [1, 1, 1]
    assert CallbackSink(callbacks[:1]).close(SUMMARY) is None


def test_an_error_of_the_last_checkpoint_is_raised_at_the_end() -> None:
    sink = CallbackSink([Ends()])
    sink.checkpoint(1, Path())
    with pytest.raises(KeyError, match="of a checkpoint"):
        sink.close(SUMMARY)
