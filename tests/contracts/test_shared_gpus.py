"""The needs of several processes on one GPU.

``vllm.v1.worker.utils.request_memory``: an engine's share is of the whole GPU, and has to be free.
``vllm.device_allocator.sleep_mode_backend.CuMemBackend.suspend``: what a sleeping engine keeps.
``vllm.v1.executor.abstract.Executor.sleep`` and ``vllm.v1.worker.gpu_worker.Worker``: what may
happen on the GPU at the same time.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.checks.gpu_memory import ASLEEP
from async_opd.memory.pools import CONTEXT
from async_opd.models.engine_args import MOST, share_left

pytestmark = pytest.mark.slow

TOTAL = 80 << 30


def requested(share: float, free: int) -> int:
    from vllm.v1.worker.utils import request_memory

    snapshot: Any = SimpleNamespace(total_memory=TOTAL, free_memory=free, device_="cuda:0")
    cache: Any = SimpleNamespace(gpu_memory_utilization=share)
    return request_memory(snapshot, cache)


@pytest.mark.parametrize("guests", [0, 1, 3, 20])
def test_an_engine_with_our_share_starts_beside_all_others_on_its_gpu(guests: int) -> None:
    beside = CONTEXT + guests * ASLEEP
    assert requested(share_left(TOTAL, beside), TOTAL - beside) <= TOTAL - beside


def test_an_engine_that_took_the_most_beside_others_would_not_start() -> None:
    with pytest.raises(ValueError, match="less than desired GPU memory utilization"):
        requested(MOST, TOTAL - CONTEXT - 5 * ASLEEP)


def test_a_sleeping_engine_keeps_neither_weights_nor_kv_cache_on_the_gpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from vllm import device_allocator
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend

    kept: list[tuple[str, ...]] = []
    allocator = SimpleNamespace(sleep=lambda offload_tags: kept.append(offload_tags))
    monkeypatch.setattr(device_allocator, "get_mem_allocator_instance", lambda: allocator)
    CuMemBackend().suspend(1)
    ((*tags,),) = kept
    assert "weights" in tags  # copied to the host's memory
    assert "kv_cache" not in tags  # dropped


def test_an_engine_that_sleeps_may_be_put_to_sleep_again() -> None:
    from vllm.v1.executor.abstract import Executor

    calls: list[str] = []
    engine: Any = SimpleNamespace(
        sleeping_tags=set(), collective_rpc=lambda name, **given: calls.append(name)
    )
    for _ in range(2):
        Executor.sleep(engine, 1)
    assert calls == ["sleep"]


def test_vllm_fails_if_others_allocate_while_an_engine_goes_to_sleep_or_free_while_it_starts() -> (
    None
):
    from vllm.v1.worker.gpu_worker import Worker

    assert "assert freed_bytes >= 0" in inspect.getsource(Worker.sleep)
    measuring = inspect.getsource(Worker.determine_available_memory)
    assert "assert init_free_memory >= free_gpu_memory" in measuring
