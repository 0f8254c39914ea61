"""vLLM's sizes of an engine without given ones: why ``config.device_defaults`` has some."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.device_defaults import ALLOCATOR_KEYS, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS

pytestmark = pytest.mark.slow  # imports vllm


def test_an_engine_of_ours_has_none_of_vllms_defaults_for_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """vllm.engine.arg_utils.EngineArgs.get_batch_defaults knows the server and the LLM class."""
    import vllm.engine.arg_utils as arg_utils
    from vllm.config.scheduler import SchedulerConfig
    from vllm.usage.usage_lib import UsageContext
    from vllm.v1.engine.async_llm import AsyncLLM

    context = inspect.signature(AsyncLLM.from_engine_args).parameters["usage_context"].default
    h100: Any = type(
        "H100",
        (),
        {
            "get_device_total_memory": staticmethod(lambda: 80 << 30),
            "get_device_name": staticmethod(lambda: "NVIDIA H100"),
            "is_tpu": staticmethod(lambda: False),
            "is_cpu": staticmethod(lambda: False),
        },
    )
    monkeypatch.setattr(arg_utils, "current_platform", h100)
    tokens, seqs = arg_utils.EngineArgs.get_batch_defaults(1)
    assert tokens[UsageContext.LLM_CLASS] >= MAX_NUM_BATCHED_TOKENS["cuda"]
    assert seqs[UsageContext.LLM_CLASS] >= MAX_NUM_SEQS["cuda"]
    assert context not in tokens
    assert context not in seqs
    assert MAX_NUM_BATCHED_TOKENS["cpu"] == SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS


def test_torch_reads_the_variable_of_the_allocator_that_we_set() -> None:
    """c10::CachingAllocator::AcceleratorAllocatorConfig, and vllm.device_allocator.alloc_conf."""
    from vllm.device_allocator.alloc_conf import ALLOC_CONF_ENV_VARS

    assert set(ALLOCATOR_KEYS) == set(ALLOC_CONF_ENV_VARS)
    header = Path(torch.__file__).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    assert f"primary environment variable for configuration is `{ALLOCATOR_KEYS[0]}`" in (
        header.read_text()
    )


def test_vllms_sleep_turns_such_segments_off_around_its_pool() -> None:
    """vllm.device_allocator.cumem.CuMemAllocator.use_memory_pool: why engines do without them."""
    from vllm.device_allocator.cumem import CuMemAllocator

    source = inspect.getsource(CuMemAllocator.use_memory_pool)
    assert "set_alloc_conf(with_conf_flag(prev_conf, EXPANDABLE_SEGMENTS, False))" in source
