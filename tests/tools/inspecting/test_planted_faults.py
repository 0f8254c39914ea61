"""Three faults that are planted in a run are found by the paths of docs/microscope.md."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from async_opd.config.load import dump_config
from async_opd.core.samples import Prompt, Rollout, Sample, VersionSpan
from async_opd.core.scores import SampledLogprobs
from async_opd.core.uid import rollout_uid
from async_opd.files.run_format import write_run_format
from tests.checks.inputs import config
from tests.trainer.models import VOCABULARY, tiny_model
from tests.trainer.test_recorder import learner_of
from tests.world.cli import Cli

DOC = (Path(__file__).parents[3] / "docs" / "microscope.md").read_text()
TEMPLATE = "You are a poet. {prompt}"
MARK = np.arange(5, dtype=np.int32)
"""The tokens of the wrong template."""
CLAMPED, STALE = "q2/0", "q5/0"


def peaked(seed: int = 0) -> Any:
    """A student whose predictions depend on its prompt."""
    made = tiny_model(seed).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return made


def logprobs(model: Any, prompt: np.ndarray, response: np.ndarray) -> np.ndarray:
    ids = torch.from_numpy(np.concatenate([prompt, response]).astype(np.int64))
    with torch.no_grad():
        rows = model(ids[None]).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()


def sample(model: Any, index: int) -> Sample:
    """A sample of one of two teachers, which are the student; ``reverse`` reads a wrong prompt."""
    random = np.random.default_rng(index)
    prompt, response = (random.integers(0, VOCABULARY, n, np.int32) for n in (4, 6))
    teacher = ("sort", "reverse")[index % 2]
    own = logprobs(model, prompt, response)
    read = prompt if teacher == "sort" else np.concatenate([MARK, prompt[::-1]])
    theirs = logprobs(model, read, response)
    uid = rollout_uid(Prompt(f"q{index}", "", "", prompt).uid, 0)  # type: ignore[arg-type]
    if uid == CLAMPED:
        theirs[3] -= 40
    version = 0 if uid == STALE else 6
    spans = (VersionSpan(version, 0, 6),)
    told = Prompt(f"q{index}", teacher, teacher, prompt)  # type: ignore[arg-type]
    made = Rollout.plain(uid, told, response, own.astype(np.float32), spans, "stop")
    return Sample(made, SampledLogprobs(theirs.astype(np.float32)))


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A step of a real trainer on real logits, and the files that a run has beside it."""
    folder = tmp_path_factory.mktemp("run")
    model = peaked()
    samples = [sample(model, index) for index in range(8)]
    learner = learner_of(folder, {"kind": "k1", "clamp": 20.0})
    learner.model.load_state_dict(model.state_dict())
    learner.version = 6
    metrics = learner.train_batch(samples).metrics
    learner.compared("flush_records")
    write_run_format(folder)
    settings = config(f"teachers.reverse.prompt_template={json.dumps(TEMPLATE)}")
    (folder / "config.yaml").write_text(dump_config(settings))
    row = {"step": 1, "time": 0.0, "perf/step_s": 1.0, **metrics}
    (folder / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    uids = [one.rollout.uid for one in samples]
    lines = [{"admitted": [*uids, "q9/0"]}, {"step": 1, "trained": uids}]
    (folder / "ledger.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def inspect(cli: Cli, folder: Path, *arguments: str) -> list[str]:
    """The lines of a command; those of the documented paths are in the document."""
    if not arguments or arguments[0] == "--worst":
        assert f"`async_opd inspect RUN_DIR{''.join(f' {one}' for one in arguments)}`" in DOC
    return cli("inspect", folder, *arguments).out.splitlines()


def cells(lines: list[str]) -> list[list[str]]:
    """The rows of all tables."""
    return [[c.strip() for c in line.split("│")[1:-1]] for line in lines if line.startswith("│")]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def test_a_clamped_token_is_found(run_dir: Path, cli: Cli) -> None:
    lines = inspect(cli, run_dir, "--worst", "gap")
    first, *others = cells(lines)[:8]
    assert (first[0], first[7].split()[0], first[10]) == (CLAMPED, "3", "clamped")
    assert not [row for row in others if row[10]]
    (token,) = [row for row in cells(lines)[8:] if row[9]]
    assert (token[0], token[9]) == ("3", "clamped")
    assert float(token[6]) > 39
    assert "status   trained in step 1" in lines


def test_a_stale_sample_is_found(run_dir: Path, cli: Cli) -> None:
    lines = inspect(cli, run_dir, "--worst", "stale")
    first, *others = cells(lines)[:8]
    assert (first[0], first[4]) == (STALE, "6")
    assert {row[4] for row in others} == {"0"}
    assert "trained by version 6; sampled by versions 0 to 0: stale by 6" in "\n".join(lines)
    assert {row[2] for row in cells(lines)[8:]} == {"0"}


def test_a_teacher_with_the_wrong_template_is_found(run_dir: Path, cli: Cli) -> None:
    lines = inspect(cli, run_dir)
    reverse, sort = cells(lines)
    assert (reverse[0], sort[0]) == ("reverse", "sort")
    assert abs(float(sort[5])) < 1e-3
    assert abs(float(reverse[5])) > 0.1
    assert any(line.startswith("teacher reverse") and TEMPLATE in line for line in lines)
    assert any(line.startswith("teacher sort") and "the student's prompt" in line for line in lines)


def test_the_summands_of_a_step_are_its_loss(run_dir: Path, cli: Cli) -> None:
    *_, last = inspect(cli, run_dir, "--step", "1")
    found = re.fullmatch(r"their summands .*: (\S+); loss/total of the step: (\S+)", last)
    assert found
    assert float(found[1]) == pytest.approx(float(found[2]), rel=1e-4)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["q2/1"], "has no record of its tokens and was never admitted"),
        (["q2/1"], "recorded samples near it: q2/0"),
        (["q9/0"], "its status: admitted, neither trained nor a dead letter"),
        (["--step", "7"], "the nearest is 1"),
    ],
)
def test_what_is_not_there_is_answered_with_what_is_near(
    run_dir: Path, cli: Cli, arguments: list[str], said: str
) -> None:
    assert said in cli("inspect", run_dir, *arguments, code=2).err


def test_a_run_without_records_says_how_to_have_some(
    run_dir: Path, tmp_path: Path, cli: Cli
) -> None:
    for name in ("run.json", "config.yaml", "metrics.jsonl"):
        (tmp_path / name).write_text((run_dir / name).read_text())
    assert "set log.microscope.share" in cli("inspect", tmp_path, code=2).err


def test_control_characters_of_a_sample_do_not_reach_the_terminal(
    run_dir: Path, tmp_path: Path, cli: Cli
) -> None:
    from async_opd.microscope import MICROSCOPE, RecordWriter, records

    for name in ("run.json", "config.yaml", "ledger.jsonl"):
        (tmp_path / name).write_text((run_dir / name).read_text())
    (one, *_) = records(run_dir)
    hostile = dict.fromkeys(one.texts, "\x1b]0;x\x07")
    written = [replace(one, texts=hostile, prompt="\x1b[2J")]
    RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 20).write(1, written)
    assert "\x07" not in cli("inspect", tmp_path, one.uid).out
