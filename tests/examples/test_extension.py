"""The example package is installed, and a config that names its loss and its source works."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
EXTENSION = ROOT / "examples" / "extension"

TRAINED = """
import json, sys
from async_opd.prepare import loss_problems
from async_opd.checks.preflight import preflight
from async_opd.config.load import load_config
from async_opd.config.run_config import RunConfig
from tests.trainer.models import random_sample, tiny_model
from trainer.build import build_learner

few = "[{kind: user, function: digits, options: {count: 20}}]"
config = load_config(sys.argv[1], [f"data.train={few}", f"data.eval={few}"])
inputs = preflight(config, "c.yaml", 0, load=True)
wrong = [
    config.model_copy(update={"loss": config.loss.model_copy(update=changed)})
    for changed in ({"function": "hellinge"}, {"options": {"power": 2}})
]
tiny_model().save_pretrained(sys.argv[2])
loss = {"kind": "user", "function": "hellinger", "options": {"scale": 4.0}, "top_k": 6}
tiny = RunConfig.model_validate({
    "student": {"model": sys.argv[2]}, "teachers": {"t": {"model": sys.argv[2]}},
    "data": {"train": "none.jsonl"}, "rollout": {"max_tokens": 16}, "loss": loss,
    "train": {"lr": 1e-2, "warmup_steps": 0}, "cluster": {"device": "cpu"},
})
learner = build_learner(tiny, "cpu")
batch = [random_sample(i, 4 + i, k=6) for i in range(3)]
print(json.dumps({
    "problems": [str(one) for one in inputs.problems + loss_problems(config, "c.yaml")],
    "first": inputs.train[0][0].prompt,
    "uids": [row.uid for row in inputs.train[0]],
    "refused": [str(one) for bad in wrong for one in loss_problems(bad, "c.yaml")],
    "losses": [learner.train_batch(batch).metrics["loss/distillation"] for _ in range(8)],
}))
"""


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("extension")
    source, target = folder / "source", folder / "installed"
    shutil.copytree(EXTENSION, source)  # a build leaves files beside the package
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet"]
    pip = [sys.executable, "-m", "pip", "install", *options, "--target", str(target), str(source)]
    subprocess.run(pip, check=True, timeout=120)
    path = [str(ROOT), str(target), os.environ["PYTHONPATH"]]
    done = subprocess.run(
        [sys.executable, "-c", TRAINED, str(EXTENSION / "config.yaml"), str(folder / "tiny")],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_its_config_is_accepted(said: dict[str, Any]) -> None:
    assert said["problems"] == []


def test_its_source_gives_the_prompts(said: dict[str, Any]) -> None:
    assert said["first"].split()[0] in ("sort", "reverse")
    assert said["uids"] == [f"0:{number}" for number in range(20)]


def test_its_loss_trains_a_student(said: dict[str, Any]) -> None:
    assert 0 < said["losses"][-1] < said["losses"][0] <= 4


def test_an_unknown_name_and_option_are_refused_with_their_cause(said: dict[str, Any]) -> None:
    unknown, option = said["refused"]
    assert "an entry point 'hellinge'" in unknown
    assert "installed: hellinger" in unknown
    assert "unexpected keyword argument 'power'" in option
