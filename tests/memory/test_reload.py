"""Memory of a load of new weights beside an engine's share, by the shapes of models."""

from __future__ import annotations

from dataclasses import replace

import pytest

from async_opd.memory.pools import reload_bytes
from async_opd.models.model_size import ModelSize

MB = 1_000_000
CHUNK = 256 << 20
QWEN3_8B = ModelSize(8_190 * MB, 0, 4096, 12288, 36, 151_936, 303_872, 4096, 1024, 32)
QWEN3_30B_A3B = ModelSize(
    30_532 * MB, 0, 2048, 768, 48, 151_936, 303_872, 4096, 512, 32, experts=128, active=8
)
QWEN3_235B_A22B = replace(QWEN3_30B_A3B, hidden=4096, inner=1536, layers=94, query=8192)


def test_a_large_embedding_is_there_as_it_came_and_made_again() -> None:
    table = 2 * 151_936 * 4096
    assert reload_bytes(QWEN3_8B, 2, 1, CHUNK) == 2 * table
    assert reload_bytes(QWEN3_8B, 2, 4, CHUNK) == table + table // 4
    assert reload_bytes(QWEN3_8B, 2, 2, None) == table // 2  # through host memory: the module alone


def test_all_experts_of_a_layer_are_one_module_which_each_gpu_is_given_whole() -> None:
    experts = 2 * 128 * 3 * 1536 * 4096
    assert reload_bytes(QWEN3_235B_A22B, 2, 8, CHUNK) == experts + 2 * experts // 8 + CHUNK
    smaller = 2 * 128 * 3 * 768 * 2048
    assert reload_bytes(QWEN3_30B_A3B, 2, 1, CHUNK) == smaller + 2 * smaller + CHUNK


def test_rows_that_vllm_adds_to_tables_keep_both_until_the_end() -> None:
    odd = replace(QWEN3_8B, vocabulary=151_937, embeddings=2 * 151_937)
    table = 2 * 151_937 * 4096
    assert reload_bytes(odd, 2, 1, CHUNK) == 3 * table


@pytest.mark.parametrize("size", [QWEN3_8B, QWEN3_30B_A3B, QWEN3_235B_A22B])
def test_more_gpus_of_an_engine_make_no_load_larger(size: ModelSize) -> None:
    found = [reload_bytes(size, 2, parallel, CHUNK) for parallel in (1, 2, 4, 8)]
    assert found == sorted(found, reverse=True)
