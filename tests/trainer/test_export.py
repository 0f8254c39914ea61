"""The model of a checkpoint is what the trainer itself would have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from async_opd.config.run_config import RunConfig
from async_opd.core.errors import CheckpointError
from tests.trainer.models import random_sample, tiny_model
from tests.world.config import run_config
from trainer.build import build_learner
from trainer.learner import Learner
from trainer.saving.export import export_checkpoint
from trainer.saving.shards import Stamp, write_shard
from trainer.saving.state import copy_parts, frozen_digest

LORA = {"rank": 4, "alpha": 8}


def config_of(student: Path, **train: Any) -> RunConfig:
    model = {"model": str(student)}
    return run_config(
        student=model,
        teachers={"t": model},
        loss={"kind": "forward_kl", "top_k": 6},
        rollout={"max_tokens": 16},
        train={"lr": 1e-2, "warmup_steps": 0, **train},
        cluster={"device": "cpu"},
    )


@pytest.fixture
def student(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "student")
    return tmp_path / "student"


def checkpoint_of(made: Learner, folder: Path) -> Path:
    """The trainer's file of a checkpoint of a single rank."""
    folder.mkdir()
    stamp = Stamp(2, 1, 1, "id", frozen_digest(made.model))
    write_shard(folder, 0, stamp, copy_parts(made.model, made._rank.optimizer))
    return folder


def trained(config: RunConfig) -> Learner:
    made = build_learner(config, "cpu")
    for step in range(2):
        made.train_batch([random_sample(10 * step + i, 4 + i, k=6) for i in range(3)])
    return made


@pytest.mark.parametrize("lora", [None, LORA], ids=["full", "lora"])
def test_the_model_of_a_checkpoint_is_the_one_that_the_trainer_saves(
    student: Path, tmp_path: Path, lora: dict[str, Any] | None
) -> None:
    config = config_of(student, lora=lora)
    made = trained(config)
    checkpoint = checkpoint_of(made, tmp_path / "step_2")
    made.save(str(student), str(tmp_path / "saved"))
    export_checkpoint(config, checkpoint, tmp_path / "exported")
    for kept in (tmp_path / "saved").rglob("*"):
        if kept.is_file():
            other = tmp_path / "exported" / kept.relative_to(tmp_path / "saved")
            assert other.read_bytes() == kept.read_bytes(), kept.name
    written = (tmp_path / "exported" / "model.safetensors").read_bytes()
    assert written != (student / "model.safetensors").read_bytes()


def test_a_checkpoint_of_another_model_is_refused(student: Path, tmp_path: Path) -> None:
    checkpoint = checkpoint_of(trained(config_of(student)), tmp_path / "step_2")
    with pytest.raises(CheckpointError, match="another model"):
        export_checkpoint(config_of(student, lora=LORA), checkpoint, tmp_path / "exported")
    assert not (tmp_path / "exported").exists()
