"""What the trainer's parts need at import."""

from __future__ import annotations

import subprocess
import sys

import pytest

MODULES = "trainer.losses, trainer.batches.packing, trainer.learner"


@pytest.mark.slow
def test_the_learner_needs_neither_ray_nor_vllm_nor_pydantic() -> None:
    absent = "".join(f"sys.modules[{name!r}] = None;" for name in ("ray", "vllm", "pydantic"))
    subprocess.run([sys.executable, "-c", f"import sys;{absent}import {MODULES}"], check=True)
