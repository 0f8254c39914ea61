"""Instructions of the CPU that the process of a worker may use."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

ALLOWED = """
import ctypes, importlib, platform, sys
importlib.import_module(sys.argv[1])
mask = ctypes.c_uint64()
assert platform.machine() == "x86_64"
arch_prctl, get_permissions, tile_data = 158, 0x1022, 18
assert ctypes.CDLL(None).syscall(arch_prctl, get_permissions, ctypes.byref(mask)) == 0
sys.exit(not mask.value >> tile_data & 1)
"""
"""Exit code 0 if the process may use AMX after the import of a module."""


@pytest.mark.slow
@pytest.mark.skipif(not torch.cpu._is_amx_tile_supported(), reason="this CPU has no AMX")
@pytest.mark.parametrize("worker", ["rollouter.freshness_worker", "teachers.scoring_worker"])
def test_a_process_with_a_worker_may_use_amx(worker: str) -> None:
    """vLLM's attention in bfloat16 uses it without asking: SIGILL."""
    assert subprocess.run([sys.executable, "-c", ALLOWED, worker], timeout=300).returncode == 0
