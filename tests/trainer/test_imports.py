"""What the trainer's parts need at import."""

from __future__ import annotations

import subprocess
import sys

import pytest

from benchmarks.gpu.all import SHARES

SCRIPTS = ("all", "tables", *SHARES)
MODULES = ", ".join(
    ["trainer.losses", "trainer.batches.packing", "trainer.learner"]
    + [f"benchmarks.gpu.{name}" for name in SCRIPTS]
)


@pytest.mark.slow
def test_the_learner_and_the_measurements_on_a_gpu_need_neither_ray_nor_vllm_nor_pydantic() -> None:
    absent = "".join(f"sys.modules[{name!r}] = None;" for name in ("ray", "vllm", "pydantic"))
    subprocess.run([sys.executable, "-c", f"import sys;{absent}import {MODULES}"], check=True)
