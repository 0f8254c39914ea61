"""Processes that benchmarks and tests fork as ranks."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.local_ranks import in_processes


def test_a_forked_rank_computes_though_this_process_has_used_several_threads() -> None:
    several, values = torch.get_num_threads(), torch.ones(1 << 20)

    def lead(*_: Any) -> float:
        return float(torch.nn.functional.silu(values).sum())

    torch.set_num_threads(2)
    try:
        expected = lead()
        assert in_processes(1, lead, lead, 20) == expected
    finally:
        torch.set_num_threads(several)
