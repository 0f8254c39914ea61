"""examples/notebook.ipynb, and runs in a notebook: its cells run under an event loop."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import async_opd
from async_opd.core.errors import ConfigError
from tests.checks.inputs import EXAMPLE, FEW, MODELS
from tests.world.training import FakeTraining

NOTEBOOK = EXAMPLE.parent / "notebook.ipynb"
QUIET = [*FEW, "log.wandb=off", "log.console=off", "cluster.device=cpu"]


def in_cells(*cells: Callable[[], Any]) -> list[Any]:
    """The results of calls under one running loop, with the handler of SIGINT that Jupyter sets."""

    async def kernel() -> list[Any]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        return [cell() for cell in cells]

    return asyncio.run(kernel())


def distil(run_dir: Path, *overrides: str, **options: Any) -> Callable[[], Any]:
    given = [*QUIET, f"run_dir={json.dumps(str(run_dir))}", *overrides]
    return lambda: async_opd.distil(EXAMPLE, overrides=given, **options)


def test_every_cell_of_the_example_runs(
    tmp_path: Path, distilling: type[FakeTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "quickstart.yaml").write_bytes(EXAMPLE.read_bytes())
    (tmp_path / "quickstart" / "data").mkdir(parents=True)
    (tmp_path / "quickstart" / "models").symlink_to(MODELS)
    rows = Path(FEW[0].partition("=[")[2].removesuffix("]")).read_bytes()
    for name in ("train.jsonl", "eval.jsonl"):
        (tmp_path / "quickstart" / "data" / name).write_bytes(rows)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    names: dict[str, Any] = {}
    cells = [
        compile("".join(cell["source"]), "cell", "exec")
        for cell in json.loads(NOTEBOOK.read_text())["cells"]
        if cell["cell_type"] == "code"
    ]
    in_cells(*(lambda cell=cell: exec(cell, names) for cell in cells))
    ended = [names[name] for name in ("summary", "again")]
    assert [(one.status, one.error, one.run_dir.name) for one in ended] == [
        ("completed", None, "notebook"),
        ("completed", None, "notebook-k1"),
    ]
    assert names["losses"].rows == [(1, 0.5)]


def test_the_example_has_no_outputs() -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    kept = [(cell["outputs"], cell["execution_count"]) for cell in cells if "outputs" in cell]
    assert {str(one) for one in kept} == {"([], None)"}


class CellOutput(io.StringIO):
    """As Jupyter's sys.stdout, whose descriptor is that of its server."""

    def fileno(self) -> int:
        return 1


def test_the_lines_of_the_console_are_in_the_output_of_the_cell(
    tmp_path: Path, distilling: type[FakeTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = CellOutput()
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    monkeypatch.setattr(sys, "stdout", output)
    in_cells(distil(tmp_path / "run", "log.console=auto"))
    assert "everything is up after" in output.getvalue()
    assert "completed" in output.getvalue()


class Failing(async_opd.Callback):  # type: ignore[name-defined, misc]
    def on_row(self, step: int, metrics: Any) -> None:
        raise KeyError("no such metric")


def test_an_error_of_a_callback_ends_the_run(
    tmp_path: Path, distilling: type[FakeTraining]
) -> None:
    (summary,) = in_cells(distil(tmp_path, callbacks=[Failing()]))
    assert summary.status == "failed"
    assert "no such metric" in summary.error


def test_interrupting_the_cell_ends_the_run_with_a_checkpoint_and_the_next_cell_runs(
    tmp_path: Path, distilling: type[FakeTraining], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[str] = []

    async def interrupted(training: FakeTraining) -> None:
        if training.job.run_dir.name == "first":
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.Event().wait()

    async def checkpoint(training: FakeTraining) -> None:
        kept.append(training.job.run_dir.name)

    monkeypatch.setattr(distilling, "run", interrupted)
    monkeypatch.setattr(distilling, "checkpoint", checkpoint)
    first, second = in_cells(distil(tmp_path / "first"), distil(tmp_path / "second"))
    assert (first.status, kept, second.status) == ("interrupted", ["first"], "completed")
    assert (tmp_path / "first" / "model").is_dir()


def test_graders_and_servers_are_checked_in_a_notebook_too(tmp_path: Path) -> None:
    (tmp_path / "grade.py").write_text("def score(response, row):\n    return 1.0\n")
    grader = f"eval.grader='{tmp_path}/grade.py:score'"
    server = "teachers.sort={kind: endpoint, urls: ['http://127.0.0.1:9/v1'], served_model: sort}"
    with pytest.raises(ConfigError, match="cannot be reached"):
        in_cells(distil(tmp_path / "run", grader, server))
