"""What the trainer's parts need at import."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("module", ["trainer.losses", "trainer.batches.packing", "trainer.learner"])
def test_the_learner_needs_neither_ray_nor_vllm_nor_pydantic(module: str) -> None:
    absent = "".join(f"sys.modules[{name!r}] = None;" for name in ("ray", "vllm", "pydantic"))
    subprocess.run([sys.executable, "-c", f"import sys;{absent}import {module}"], check=True)
