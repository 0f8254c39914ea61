"""Private memory of a process while a block runs."""

from __future__ import annotations

import threading

import pytest
import torch

from benchmarks import load_memory
from benchmarks.load_memory import PrivatePeak, private_bytes

MIB = 1 << 20


def test_memory_that_is_freed_within_the_block_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    filled, sampled = threading.Event(), threading.Event()

    def noting() -> int:
        was_filled, found = filled.is_set(), private_bytes()
        if was_filled:
            sampled.set()
        return found

    monkeypatch.setattr(load_memory, "private_bytes", noting)
    with PrivatePeak() as peak:
        held = torch.ones(256 * MIB, dtype=torch.uint8)  # far beyond what the allocator has free
        filled.set()
        assert sampled.wait(30)
        del held
    assert 200 * MIB < peak.nbytes < 400 * MIB
