"""Bounds of calls that copy, write or read the trainer's whole state."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from async_opd.checkpoint.checkpointer import state_s
from tests.world.config import run_config as config


@pytest.mark.parametrize(("rate", "bound_s"), [(1.0, 607.5), (0.5, 615.0)])
def test_the_time_of_12_bytes_each_is_added(rate: float, bound_s: float, tmp_path: Path) -> None:
    save_file({"w": np.zeros((1024, 640), np.float16)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    made = config(student={"model": str(tmp_path)}, checkpoint={"min_mib_per_s": rate})
    assert state_s(made) == bound_s
