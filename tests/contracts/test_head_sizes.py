"""Sizes of attention heads for which vLLM has kernels on a CPU: ``checks.models`` has a list."""

from __future__ import annotations

import pytest

from async_opd.checks.models import HEAD_DIMS_ON_CPU

pytestmark = pytest.mark.slow  # imports vllm


def test_the_list_is_vllms() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert CPUAttentionBackend.get_supported_head_sizes() == list(HEAD_DIMS_ON_CPU)
