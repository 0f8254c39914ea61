"""``async_opd eval``: what it refuses, what it starts, and what it writes, on fake engines."""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.checkpoint.store import Checkpoint
from async_opd.cli import main
from async_opd.cluster import launch_parts
from async_opd.config.load import dump_config, load_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import StageError
from async_opd.core.reports import Progress
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import SamplingSpec
from async_opd.files.run_format import write_run_format
from async_opd.models.tokenizer import Text
from async_opd.observability.live.console import next_commands
from async_opd.observability.sinks import Summary
from async_opd.tools import given_run
from tests.world.cli import Cli
from trainer.saving import export as checkpoint_model

EXAMPLE = Path(__file__).parents[2] / "examples" / "quickstart.yaml"
MODELS = EXAMPLE.parent / "quickstart" / "models"
FEW = ["eval.max_prompts=3"]


class Stage:
    """Answers every prompt with its sorted letters, which is right for source ``sort``."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.text = config, Text.of(config)
        self.fails = False

    async def run(self) -> None:
        if self.fails:
            raise StageError("eval/0", "its process died")
        await asyncio.Event().wait()

    async def progress(self) -> Progress:
        return Progress(0)

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        if self.fails:
            await asyncio.Event().wait()
        letters = [self.text.decode(prompt.token_ids.tolist()) for prompt in prompts]
        answers = ["".join(sorted(word.rpartition(":")[2].strip("=> "))) for word in letters]
        return [
            Rollout.answer(f"{prompt.uid}/{m}", prompt, self.text.plain(answer), "stop")
            for prompt, answer in zip(prompts, answers, strict=True)
            for m in range(sampling.n)
        ]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Stage]:
    """The stages that were launched."""
    found: list[Stage] = []

    @asynccontextmanager
    async def fake(config: RunConfig, **_: Any) -> AsyncIterator[Stage]:
        found.append(Stage(config))
        yield found[-1]

    monkeypatch.setattr(launch_parts, "launch_evaluators", fake)
    return found


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_it_writes_answers_and_metrics_and_prints_a_table(
    started: list[Stage], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", str(EXAMPLE), *FEW, "--out", str(tmp_path / "out")]) == 0
    metrics = json.loads((tmp_path / "out" / "result.json").read_text())
    assert {"eval/sort/mean@1", "eval/reverse/pass@1"} <= set(metrics)
    assert len(lines(tmp_path / "out" / "answers.jsonl")) == 6
    assert "mean@1" in capsys.readouterr().out


def test_a_teacher_answers_its_own_prompts_on_an_engine_with_its_model(
    started: list[Stage], tmp_path: Path, cli: Cli
) -> None:
    out = str(tmp_path / "out")
    printed = cli("eval", EXAMPLE, "--teacher", "sort", "--json", *FEW, "--out", out)
    assert json.loads(printed.out)["eval/sort/mean@1"] >= 0
    assert {line["data_source"] for line in lines(tmp_path / "out" / "answers.jsonl")} == {"sort"}
    assert Path(started[0].config.student.model).name == "teacher-sort"


def test_the_command_that_a_completed_run_prints_evaluates_its_model(
    started: list[Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "runs" / "mine"
    shutil.copytree(MODELS / "student", run_dir / "model")
    write_run_format(run_dir)
    (run_dir / "config.yaml").write_text(dump_config(load_config(EXAMPLE, FEW)))
    monkeypatch.chdir(tmp_path)
    ended = Summary("completed", "", 8, 60.0, run_dir, {"eval/sort/accuracy": 1.0})
    (command,) = [line for line in next_commands(ended) if line.startswith("async_opd eval")]
    assert main(shlex.split(command)[1:]) == 0
    assert started[0].config.eval.n == 4


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (["--teacher", "none"], "no teacher none"),
        (["--teacher", "sort", str(MODELS / "student")], "name one of both"),
        (["no/such/model"], "MODEL|RUN_DIR: no/such/model does not exist"),
        ([str(MODELS / "student"), str(MODELS / "teacher-sort")], "name one model"),
        (["data.eval=[]"], "no source of prompts"),
        (["eval.grader=nonsense"], "eval.grader"),
        (["cluster.device=cuda"], "the engines take 1 GPU, this machine has 0"),
    ],
)
@pytest.mark.usefixtures("torch_for_gpus")
def test_bad_input_is_refused_before_an_engine_starts(
    started: list[Stage], cli: Cli, given: list[str], words: str
) -> None:
    assert words in cli("eval", EXAMPLE, *given, code=2).err
    assert started == []


def test_an_engine_that_dies_is_exit_code_1(
    monkeypatch: pytest.MonkeyPatch, started: list[Stage], tmp_path: Path, cli: Cli
) -> None:
    monkeypatch.setattr(Stage, "fails", True, raising=False)
    monkeypatch.setattr(Stage, "__init__", lambda self, config: None)
    assert "its process died" in cli("eval", EXAMPLE, *FEW, "--out", tmp_path, code=1).err


@pytest.mark.engine
@pytest.mark.slow
def test_the_quickstarts_teacher_knows_its_task(tmp_path: Path, cli: Cli) -> None:
    given = ["eval", str(EXAMPLE), "--teacher", "sort", "--json", "eval.max_prompts=32"]
    found = json.loads(cli(*given, "--out", tmp_path).out)
    assert found["eval/sort/mean@1"] >= 0.97
    assert np.isfinite(found["eval/seconds"])


def checkpoint_in(run_dir: Path) -> Path:
    """A run directory with a checkpoint that has a manifest."""
    folder = run_dir / "checkpoints" / "step_5"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")
    write_run_format(run_dir)
    (run_dir / "config.yaml").write_text(dump_config(load_config(EXAMPLE, ["run_dir=null"])))
    return folder


def test_a_checkpoint_is_evaluated_by_the_model_that_is_written_of_it(
    started: list[Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = checkpoint_in(tmp_path / "run"), tmp_path / "out"

    def export(config: RunConfig, checkpoint: Path, target: Path) -> None:
        assert checkpoint == folder
        shutil.copytree(config.student.model, target)

    config = load_config(folder.parents[1] / "config.yaml").model_dump(mode="json", by_alias=True)
    found = Checkpoint(folder, None, json.dumps({"config": config}))  # type: ignore
    monkeypatch.setattr(given_run, "load", lambda path: found)
    monkeypatch.setattr(checkpoint_model, "export_checkpoint", export)
    assert main(["eval", str(EXAMPLE), str(folder), *FEW, "--out", str(out)]) == 0
    assert started[0].config.student.model == str(out / "model")
    assert (out / "result.json").exists()


def test_a_damaged_checkpoint_is_refused_before_an_engine_starts(
    started: list[Stage], tmp_path: Path, cli: Cli
) -> None:
    folder = checkpoint_in(tmp_path / "run")
    (folder / "cut.json").write_text("{}")
    printed = cli("eval", EXAMPLE, folder, "--out", tmp_path / "out", code=2)
    assert "is not a checkpoint" in printed.err
    assert started == []
