"""The student of a checkpoint as a model's directory, made on the CPU without any other rank.

student.model ──► model ◄── trainer-0-of-N.safetensors …        model ──► config.json, weights, …
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from trainer.saving.export import export_dtype, save_model
from trainer.saving.shards import Shards
from trainer.saving.state import load_model, refuse_other_frozen
from trainer.student.adapters import adapter_parameters
from trainer.student.loading import empty_student, fill_student
from trainer.student.named_weights import named_weights

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig


def export_checkpoint(config: RunConfig, checkpoint: Path, directory: Path) -> None:
    """Writes what the run of this config had as its student at the checkpoint, adapters merged.

    It takes host memory for the student's weights. CheckpointError for a checkpoint of another
    model, or of adapters over other weights.
    """
    student, device = empty_student(config, torch.device("cpu")), torch.device("cpu")
    fill_student(student, config, device, None)
    model, shards = student.model, Shards(checkpoint)
    load_model(model, shards)
    refuse_other_frozen(model, shards.stamp)
    source = config.student.model
    dtype = export_dtype(config.train.export_dtype, source)
    weights = chain(named_weights(model, dtype, copied=False), adapter_parameters(model))
    save_model(model, source, str(directory), weights, dtype)


def export_verified(checkpoint: Path, directory: Path, dtype: str | None = None) -> None:
    """``export_checkpoint`` by the config of the checkpoint's run directory, in ``dtype``.

    CheckpointError also for a checkpoint that was damaged; ConfigError for its run directory.
    """
    from async_opd.checkpoint.store import load
    from async_opd.config.load import load_config
    from async_opd.files.run_format import refuse_other_formats

    run_dir = checkpoint.absolute().parents[1]
    refuse_other_formats(run_dir)
    config = load_config(run_dir / "config.yaml")
    if dtype is not None:
        train = config.train.model_copy(update={"export_dtype": dtype})
        config = config.model_copy(update={"train": train})
    export_checkpoint(config, load(checkpoint.absolute()).folder, directory)
