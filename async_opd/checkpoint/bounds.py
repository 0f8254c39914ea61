"""How long a call may last that copies, writes or reads the trainer's whole state."""

from __future__ import annotations

from pathlib import Path

from async_opd.config.run_config import RunConfig
from async_opd.models.model_size import ModelSize

STATE_BYTES = 12
"""Of each parameter: the float32 weight and AdamW's two moments. Neither a model that is exported
nor a state with adapters or smaller moments has more."""


def state_s(config: RunConfig) -> float:
    """Seconds: ``checkpoint.timeout_s`` and the time of the bytes of all ranks together.

    It reads the headers of the student's files. ModelError if they cannot be read.
    """
    size = ModelSize.read(Path(config.student.model))
    return config.checkpoint.bound_s(STATE_BYTES * size.floats)
