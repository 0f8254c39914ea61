"""Processes that benchmarks and tests fork as ranks."""

from __future__ import annotations

from typing import Any

import pytest
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


def test_a_rank_waits_for_no_thread_of_inductors_pool_in_the_parent() -> None:
    from torch._inductor.async_compile import AsyncCompile

    def lead(*_: Any) -> int:
        return AsyncCompile.pool().submit(lambda: 7).result(20)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._inductor.config.compile_threads", 2)
        assert lead() == 7
        assert in_processes(1, lead, lead, 60) == 7
