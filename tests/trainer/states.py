"""The state of a learner as full tensors: written as a checkpoint, and read again."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

from trainer.learner import Learner
from trainer.saving.shards import FORMER_FILE, Shards

State = dict[str, torch.Tensor]


def state_of(learner: Learner) -> State:
    """All tensors of a checkpoint that the learner's ranks write now."""
    learner.capture(version=0)
    with tempfile.TemporaryDirectory() as folder:
        learner.write(folder)
        shards = Shards(Path(folder))
        return {name: shards.read(name) for name in shards.names}


def restore(learner: Learner, step: int, state: State) -> None:
    """Has the learner's ranks read these tensors, as those after ``step`` steps."""
    with tempfile.TemporaryDirectory() as folder:
        numbers = {"step": str(step), "version": "0"}
        save_file(state, Path(folder) / FORMER_FILE, metadata=numbers)
        learner.restore(folder)
