"""A signal during the end of a run that has failed, in a process of its own: it has failed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

PROGRAM = """
import asyncio, os, signal, sys, time
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

from async_opd import run as module
from async_opd.prepare import Prepared
from async_opd.core.errors import StageError
from async_opd.checks.preflight import Inputs
from tests.checkpoint.test_store import ROWS
from tests.world.config import run_config
from tests.world.training import FakeText, FakeTraining, SavingTrainer

when, run_dir = sys.argv[1:]

def stuck():
    os.kill(os.getpid(), signal.SIGTERM)

    async def forever():
        await asyncio.sleep(0.05)
        time.sleep(60)  # the event loop does nothing more

    return forever()

class Trainer(SavingTrainer):
    async def save(self, directory):
        if when == "model":
            await stuck()

class Training(FakeTraining):
    error = StageError("guardrail", "responses run away")

    async def checkpoint(self):
        if when == "checkpoint":
            await stuck()
        if when == "second signal":
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                await asyncio.sleep(0.05)
            await asyncio.sleep(60)

@asynccontextmanager
async def launch(*args, **options):
    try:
        trainer = Trainer()
        yield SimpleNamespace(trainer=trainer, save_early=trainer.save, watched=lambda work: work)
    finally:
        if when == "processes":
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)

module.launch, module.Training = launch, Training
module.Text = FakeText
grace = {"grace_s": 60 if when == "second signal" else 0.2}
made = run_config(run_dir=run_dir, log={"wandb": "off"}, shutdown=grace)
sys.exit(module.run(Prepared(made, Inputs(ROWS), "cpu")))
"""


@pytest.mark.parametrize("when", ["checkpoint", "second signal", "model", "processes"])
def test_a_run_that_has_failed_is_recorded_as_failed_whatever_a_signal_ends(
    tmp_path: Path, when: str
) -> None:
    """While its checkpoint or model is written, or its processes end."""
    command = [sys.executable, "-c", PROGRAM, when, str(tmp_path)]
    ended = subprocess.run(command, timeout=120, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert "guardrail: responses run away" in summary["error"]
