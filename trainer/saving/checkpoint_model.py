"""The student of a checkpoint as a model's directory, made on the CPU without any other rank.

student.model ──► model ◄── trainer-0-of-N.safetensors …        model ──► config.json, weights, …
"""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from async_opd.core.errors import CheckpointError
from async_opd.files.disk_space import without_space
from async_opd.models.model_size import ModelSize
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
    model, or of adapters over other weights, and if the disk has no space for the model.
    """
    source = config.student.model
    dtype = export_dtype(config.train.export_dtype, source)
    floats = ModelSize.of_weights(source).floats
    if figures := without_space(floats * dtype.itemsize, directory):
        remedy = "make space there, or name a directory on another disk"
        raise CheckpointError("export", f"the model would have {figures}", remedy)
    student, device = empty_student(config, torch.device("cpu")), torch.device("cpu")
    fill_student(student, config, device, None)
    model, shards = student.model, Shards(checkpoint)
    load_model(model, shards)
    refuse_other_frozen(model, shards.stamp)
    weights = chain(named_weights(model, dtype, copied=False), adapter_parameters(model))
    save_model(model, source, str(directory), weights, dtype)
