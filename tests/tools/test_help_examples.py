"""The examples in each command's ``--help`` run as printed, in a directory with one finished run.

``FAKED`` starts engines, a cluster or an upload as fakes; of ``PARSED``, which need more than this
machine has, only the arguments are read.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import time
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.checkpoint.store import FOLDER, Checkpoints
from async_opd.cli import COMMANDS, main, parser
from async_opd.microscope import MICROSCOPE, RecordWriter
from async_opd.observability.run_log import METRICS, SUMMARY
from async_opd.tools import export
from async_opd.tools.doctor import engines
from tests.checkpoint.test_store import cut
from tests.microscope.samples import record
from tests.tools.plan.runs import line
from tests.tools.plan.test_command import short
from tests.tools.probe.test_command import cluster
from tests.tools.qualify.test_harness import passing, table
from tests.tools.replay import kept
from tests.tools.test_evaluate import started
from trainer.build import build_learner

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("short")]
__all__ = ["cluster", "passing", "short", "started", "table"]  # fixtures

EXAMPLES = Path(__file__).parents[2] / "examples"
INPUTS = {
    "quickstart/models/student": "models/student",
    "quickstart/models/teacher-sort": "models/teacher",
    "quickstart/models/teacher-reverse": "models/coder",
    "quickstart/data/train.jsonl": "train.jsonl",
    "quickstart/data/eval.jsonl": "test.jsonl",
}
FAKED = {
    "run": "distilling",
    "quickstart": "distilling",
    "eval": "started",
    "probe": "cluster",
    "qualify": "passing",
}
"""Commands that start engines, and the fixture with their fakes; ``doctor --engines``, ``replay``
and ``export --push`` have theirs in ``here``."""
PARSED = {
    "async_opd check config.yaml --cluster": "a running cluster",
    "async_opd plan runs/first --gpus 8": "a run of more steps than its fake makes",
    "async_opd init": "a terminal, on which it asks",
    "async_opd export s3://bucket/runs/a/step_160 mirrored-160": "a bucket",
    "async_opd import run_qwen3_8b_fsdp.sh": "a file of another framework",
    "async_opd import rl.toml --output config.yaml": "a file of another framework",
}
"""Examples of which only the arguments are read, and what they need."""


def examples(command: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Those of a command's help, without what a shell does with their output."""
    with pytest.raises(SystemExit):
        main([*([command] if command else []), "--help"])
    shown = capsys.readouterr().out.replace("\\\n", " ")
    found = re.findall(r"^  (?:eval \"\$\()?(async_opd [^)>\n]*)", shown, flags=re.MULTILINE)
    return [" ".join(one.split()) for one in found]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The quickstart's models, trained for 12 steps, with the metrics of 60."""
    folder = tmp_path_factory.mktemp("finished")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(kept, "BATCH", 8)  # whole groups of 8, as an example of plan has
        return finished(folder)


def finished(folder: Path) -> Path:
    """All files that a run leaves which commands read."""
    config = kept.config_of(folder, "train.steps=60")
    kept.begin(config, folder)
    rows = [of_teachers(line(step), list(config.teachers)) for step in range(1, 61)]
    rows += [{"step": 60, "time": 1066.0, "eval/seconds": 2.5, "eval/sort/accuracy": 0.9}]
    (folder / METRICS).write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = {"status": "completed", "seconds": 100.0, "steps": 60, "eval/sort/accuracy": 0.9}
    (folder / SUMMARY).write_text(json.dumps(ended))
    learner = build_learner(config, "cpu")
    kept.train(config, learner, range(1, 13))
    learner.save(config.student.model, str(folder / "model"))
    store = Checkpoints(folder / FOLDER, 9)
    learner.capture(160)
    part = store.begin(160)
    tree = {"config": config.model_dump(mode="json", by_alias=True), "data": "d1g35t"}
    store.commit(part, cut(160), json.dumps(tree), learner.write(str(part)))
    sample = record("0:3#0/1", 24, step=12, teacher="sort", data_source="sort")
    RecordWriter(folder / MICROSCOPE, 0, 1 << 20).write(12, [sample])
    return folder


def of_teachers(row: dict[str, Any], names: list[str]) -> dict[str, Any]:
    """A row of the metrics with those of teacher ``a`` for each teacher."""
    named = {key.removeprefix("teacher/a/"): value for key, value in row.items() if "/a/" in key}
    own = {key: value for key, value in row.items() if "/a/" not in key}
    return own | {f"teacher/{name}/{key}": value for name in names for key, value in named.items()}


@pytest.fixture
def here(run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a config and its inputs, and the finished run; it is the working directory.

    Each moment has another name, by which run directories differ.
    """
    text = (EXAMPLES / "quickstart.yaml").read_text()
    for source, name in INPUTS.items():
        copy = shutil.copytree if (EXAMPLES / source).is_dir() else shutil.copyfile
        (tmp_path / name).parent.mkdir(exist_ok=True)
        copy(EXAMPLES / source, tmp_path / name)
        text = text.replace(source, name)
    for file in tmp_path.glob("models/*/config.json"):  # room for the examples' responses
        roomy = json.loads(file.read_text()) | {"max_position_embeddings": 4096}
        file.write_text(json.dumps(roomy))
    shutil.copyfile(tmp_path / "train.jsonl", tmp_path / "py.jsonl")
    (tmp_path / "config.yaml").write_text(f"{text}eval: {{max_prompts: 3}}\n")
    shutil.copytree(run_dir, tmp_path / "runs" / "quickstart")
    shutil.copytree(run_dir, tmp_path / "runs" / "lr6")
    moments = map(str, count())
    clock = SimpleNamespace(time=time.time, strftime=lambda form: next(moments))
    for module in ("run", "tools.evaluate", "tools.first_steps.command"):
        monkeypatch.setattr(f"async_opd.{module}.time", clock)
    monkeypatch.setattr(export, "push", lambda folder, repo: f"https://hub/{repo}")
    monkeypatch.setattr(engines, "run_engines", lambda config, where, say: iter(()))
    monkeypatch.setenv("WANDB_MODE", "offline")
    kept.launched(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_the_examples_of_the_help_run_as_printed(
    command: str, here: Path, capsys: pytest.CaptureFixture[str], request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(FAKED.get(command or "run", "here"))
    if command in ("", "run"):
        shutil.rmtree(here / "runs" / "lr6")  # the example makes it
    found = examples(command, capsys)
    assert found
    for example in found:
        words = shlex.split(example)[1:]
        if example in PARSED:
            assert parser(words[0]).parse_args(words).command
        else:
            assert main(words) == 0, (example, capsys.readouterr())


def test_the_examples_that_are_only_parsed_are_in_the_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = [one for command in ("", *COMMANDS) for one in examples(command, capsys)]
    assert set(PARSED) <= set(shown)
