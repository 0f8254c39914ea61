"""A prompt source is one module and one entry of the registry."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from async_opd.config.registry import SOURCES
from async_opd.config.run_config import RunConfig
from tests.checks.inputs import EXAMPLE

ROOT = Path(__file__).parents[2]

RUN_OF_A_THIRD = """
import json, sys
from async_opd.config.registry import SOURCES
SOURCES["squares"] = "third:SquaresSource"

from async_opd.config.load import dump_config, load_config
from async_opd.checks.preflight import preflight
from async_opd.data.prompts import PromptStream

train = "[{kind: squares, window: 8}, {kind: squares, subject: reverse, window: 8}]"
config = load_config(sys.argv[1], [f"data.train={train}"])
inputs = preflight(config, "c.yaml", 0)
stream = PromptStream(inputs.train, [1.0, 1.0], lambda text: [len(text)], config.teacher_of, seed=0)
prompts = stream.next(96)
print(json.dumps({
    "kinds": [type(source).__name__ for source in config.data.train],
    "problems": [str(problem) for problem in inputs.problems],
    "uids": sorted(prompt.uid for prompt in prompts),
    "dumped": "kind: squares" in dump_config(config),
}))
"""


@pytest.mark.slow
def test_a_third_kind_of_source_is_one_module_and_one_entry(tmp_path: Path) -> None:
    """The config takes it, the preflight checks its rows, and the stream gives its prompts."""
    shutil.copy(Path(__file__).parent / "squares_source.py", tmp_path / "third.py")
    done = subprocess.run(
        [sys.executable, "-c", RUN_OF_A_THIRD, str(EXAMPLE)],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"},
    )
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["kinds"], said["dumped"]) == (["SquaresSource"] * 2, True)
    assert said["problems"] == []
    assert said["uids"] == sorted(f"{source}:{at}#0" for source in (0, 1) for at in range(48))


def test_every_entry_is_a_kind_that_the_config_takes() -> None:
    refused = {"data": {"train": [{"kind": "no such kind"}]}}
    with pytest.raises(ValueError, match="no such kind") as caught:
        RunConfig.model_validate(refused)
    assert all(f"'{kind}'" in str(caught.value) for kind in SOURCES)
