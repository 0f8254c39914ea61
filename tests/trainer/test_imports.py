"""The imports of the trainer's parts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from async_opd.tools.qualify.rows import ROWS

OTHERS = ("ray", "vllm", "pydantic", "psutil", "msgspec", "pyarrow", "rich", "wandb")
"""Packages that async_opd needs beside torch, transformers and what these need."""
SCRIPTS = {row.module for row in ROWS.values() if not row.packages}
QUALIFY = [f"tools.qualify.{name}" for name in ("command", "harness", "tables")]
MODULES = ", ".join(
    ["trainer.losses", "trainer.batches.packing", "trainer.learner"]
    + [f"async_opd.{name}" for name in ("cli", *QUALIFY)]
    + [f"async_opd.tools.qualify.measurements.{name}" for name in SCRIPTS]
)


@pytest.mark.slow
def test_the_learner_and_the_measurements_on_a_gpu_need_torch_and_transformers_alone() -> None:
    absent = "".join(f"sys.modules[{name!r}] = None;" for name in OTHERS)
    subprocess.run([sys.executable, "-c", f"import sys;{absent}import {MODULES}"], check=True)


@pytest.mark.slow
def test_a_trainers_process_imports_no_vllm_before_it_sends_over_nccl() -> None:
    modules = "async_opd.cluster.trainer_actor, rollouter.transports.nccl, trainer.build"
    command = f"import sys; sys.modules['vllm'] = None; import {modules}"
    subprocess.run([sys.executable, "-c", command], check=True)
