"""Memory of a process beside its tensors, of a load of weights, and of a host that torch pins."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.run_config import RunConfig
from async_opd.memory.pools import (
    COMMUNICATOR,
    Machine,
    PoolMemory,
    cache_tokens,
    communicators,
    kept_copies,
    memory_of,
    outside,
    reload_bytes,
)
from async_opd.models.model_size import ModelSize, power_of_two
from tests.checks.inputs import MODELS
from tests.world.config import run_config
from trainer.saving.state import BUFFER_BYTES

BILLION = 1_000_000_000
CHUNK = 256 << 20
SIZE = ModelSize(4 * BILLION, 0, 2560, 9728, 36, 151_936, 151_936, 4096, 1024, 32)
SIZES = {
    "dense": SIZE,
    "mixture": replace(SIZE, experts=128, active=8, inner=768),
    "large table": replace(SIZE, numels=((151_936 * 2560, 1), (100, 30))),
}
ON_GPUS = Machine("cuda", 80 << 30, SIZES.__getitem__)


def config(student: str = "dense", **sections: Any) -> RunConfig:
    smallest = {"student": {"model": student}, "teachers": {"a": {"model": "dense"}}}
    return run_config(**{**smallest, **sections})


def of(pool: str, made: RunConfig) -> int:
    return communicators(made, pool, ON_GPUS)


def pinned_by_torch(sizes: Sequence[int]) -> int:
    """Of copies in this order, as trainer.offload.HostBuffers lays them out."""
    piece = min(power_of_two(sum(sizes)), BUFFER_BYTES)
    total, left = 0, 0
    for nbytes in sizes:
        if nbytes > left:
            room = max(nbytes, piece)
            total, left = total + power_of_two(room), room
        left -= nbytes
    return total


@given(
    st.lists(st.tuples(st.integers(1, 500 << 20), st.integers(1, 6)), min_size=1, max_size=6),
    st.sampled_from([1, 2, 8]),
    st.randoms(use_true_random=False),
)
def test_the_plan_bounds_the_memory_that_copies_for_a_checkpoint_pin(
    numels: list[tuple[int, int]], shards: int, random: Random
) -> None:
    """Of weights and two moments."""
    sizes = [4 * -(-numel // shards) for numel, count in numels for _ in range(3 * count)]
    random.shuffle(sizes)
    planned = kept_copies(replace(SIZE, numels=tuple(numels)), sum(sizes), shards)
    assert pinned_by_torch(sizes) <= planned


@pytest.mark.parametrize(
    ("train", "count"),
    [
        ({}, 0),
        ({"ranks": 4}, 1),
        ({"ranks": 4, "replicate": 2}, 3),
        ({"ranks": 4, "context_parallel": 2}, 2),
    ],
)
def test_a_rank_has_a_communicator_a_kind_of_group(train: dict[str, Any], count: int) -> None:
    over_gloo = {"sync": {"backend": "gloo"}, "train": train}
    assert of("train", config(**over_gloo)) == count
    plain = config(train=train)
    assert of("train", plain) == count + 1  # that of weight syncs
    assert memory_of(plain, "train", ON_GPUS).gpu["NCCL communicators"] == (
        COMMUNICATOR * (count + 1)
    )


def test_rank_0_has_a_communicator_for_each_group_of_a_weight_sync() -> None:
    three = {"rollout": {"replicas": 3}, "eval": {"replicas": 2, "every": 1}}
    assert of("train", config(**three)) == 3
    assert of("train", config(**three, sync={"rolling": True})) == 5


def test_an_engine_has_communicators_of_its_workers_of_experts_and_of_weight_syncs() -> None:
    two = {"tensor_parallel": 2}
    assert [of("rollout", config(model, rollout=two)) for model in ("dense", "mixture")] == [2, 3]
    assert of("rollout", config()) == 1
    assert of("teachers.a", config()) == 0
    assert of("teachers.a", config(teachers={"a": {"model": "mixture", **two}})) == 2


def test_engines_on_the_trainers_gpus_have_none_of_weight_syncs() -> None:
    made = config(rollout={"placement": "colocated", "with": "train"})
    assert [of(pool, made) for pool in ("train", "rollout")] == [0, 0]


# ── loads of weights ───────────────────────────────────────────────────────────────────────────


def load(pool: str, made: RunConfig) -> int:
    return outside(made, pool, ON_GPUS).get("weight load", 0)


def test_a_load_is_planned_of_the_students_engines_and_of_teachers_that_follow_it() -> None:
    teachers = {
        "a": {"model": "dense"},
        "now": {"kind": "self", "refresh_every": 2},
        "then": {"kind": "self"},
    }
    made = config(teachers=teachers, eval={"replicas": 1, "every": 1})
    assert load("rollout", made) == load("eval", made) == reload_bytes(SIZE, 2, 1, CHUNK)
    assert load("teachers.now", made) == reload_bytes(SIZE, 2, 1, None)
    assert load("teachers.a", made) == load("teachers.then", made) == 0
    over_gloo = config(sync={"backend": "gloo"})
    assert load("rollout", over_gloo) == reload_bytes(SIZE, 2, 1, None)


# ── host memory that torch pins ────────────────────────────────────────────────────────────────


def test_a_pinned_tensor_takes_the_next_power_of_two() -> None:
    size = replace(SIZE, numels=((5, 2), (8, 1)))
    assert size.pinned() == (8 + 8 + 8) / 18
    assert size.pinned(2) == (4 + 4 + 4) / 10
    assert SIZE.pinned() == 1.0  # its tensors are not known


def test_the_tensors_of_a_model_are_known_by_its_files() -> None:
    read = ModelSize.read(Path(MODELS) / "student")
    assert sum(numel * count for numel, count in read.numels) == read.floats


def of_train(**sections: Any) -> PoolMemory:
    return memory_of(config("large table", **sections), "train", ON_GPUS)


def test_what_is_offloaded_takes_what_torch_pins_for_it() -> None:
    factor = SIZES["large table"].pinned()
    assert factor > 1.3
    plain = 4 * 4 * BILLION
    moments = of_train(train={"offload": "moments"}).host
    assert moments["moments"] == int(2 * plain * factor)
    everything = of_train(train={"offload": "parameters"}).host
    assert everything["parameters"] == everything["gradients"] == int(plain * factor)
    assert everything["moments"] == 2 * plain  # stay where they are: not pinned
    colocated: dict[str, Any] = {"rollout": {"placement": "colocated", "with": "train"}}
    between = of_train(**colocated).host  # two steps: gradients are freed
    assert {"parameters", "moments"} <= between.keys()
    assert "gradients" not in between
    asleep = memory_of(config("large table", **colocated), "rollout", ON_GPUS).host
    assert asleep["weights asleep"] == int(2 * 4 * BILLION * factor)


def test_a_snapshot_has_chunks_and_larger_tensors_of_powers_of_two() -> None:
    table, rest = 2 * 151_936 * 2560, 2 * 4 * BILLION - 2 * 151_936 * 2560
    assert of_train().first["snapshot"] == power_of_two(table) + rest
    odd = of_train(sync={"chunk_mib": 200}).first["snapshot"]
    assert odd == power_of_two(table) + rest * 256 // 200


def mixture(experts: int, inner: int) -> tuple[ModelSize, Machine]:
    """Of 36 layers, and nothing beside its experts."""
    one = inner * 2560
    numels = ((one, 36 * experts * 3),)
    sizes = replace(
        SIZE, floats=36 * experts * 3 * one, experts=experts, inner=inner, numels=numels
    )
    return sizes, replace(ON_GPUS, sizes=lambda model: sizes)


def test_experts_larger_than_a_chunk_are_two_tensors_and_end_a_chunk_in_each_layer() -> None:
    _, machine = mixture(128, 768)
    found = memory_of(config("mixture"), "train", machine).first["snapshot"]
    together = (power_of_two(2 * 2 * 128 * 768 * 2560), power_of_two(2 * 128 * 768 * 2560))
    assert found == 36 * (sum(together) + CHUNK)


def test_experts_that_have_room_in_a_chunk_take_their_own_bytes() -> None:
    sizes, machine = mixture(16, 768)
    assert memory_of(config("mixture"), "train", machine).first["snapshot"] == 2 * sizes.floats


def test_kept_weights_of_a_mixture_are_pinned_as_they_are_sent() -> None:
    _, machine = mixture(160, 512)
    sections = {"cluster": {"trainer_recovery": "replica"}, "sync": {"verify_every": 1}}
    recovered = config("mixture", **sections)
    found = memory_of(recovered, "rollout", machine).host["weights for the trainer"]
    together = (2 * 2 * 160 * 512 * 2560, 2 * 160 * 512 * 2560)
    assert found == 36 * sum(map(power_of_two, together))


def test_weights_of_sleeping_engines_are_pinned_too() -> None:
    made = config("large table", rollout={"placement": "colocated", "with": "train"})
    asleep = memory_of(made, "rollout", ON_GPUS).host["weights asleep"]
    assert asleep == int(2 * 4 * BILLION * SIZES["large table"].pinned())


@pytest.mark.parametrize(
    "engine", [{"kv_cache_dtype": "fp8"}, {"extra": {"kv_cache_dtype": "fp8_e5m2"}}]
)
def test_a_quantized_cache_holds_more_tokens(engine: dict[str, Any]) -> None:
    small = {"engine": engine}
    halves = [
        cache_tokens(config(rollout=rollout), "rollout", ON_GPUS, 1 << 30)
        for rollout in ({}, small)
    ]
    assert halves[1] // halves[0] == 2


def test_a_cache_of_bfloat16_is_half_of_float32s() -> None:
    engines = [{"dtype": "float32"}, {"dtype": "float32", "kv_cache_dtype": "bfloat16"}]
    tokens = [
        cache_tokens(config(rollout={"engine": engine}), "rollout", ON_GPUS, 1 << 30)
        for engine in engines
    ]
    assert tokens[1] // tokens[0] == 2


def weights(engine: dict[str, Any], model: str = "dense") -> int:
    made = config(model, rollout={"engine": engine})
    return memory_of(made, "rollout", ON_GPUS).gpu["weights"]


@pytest.mark.parametrize("engine", [{}, {"extra": {"quantization": "gptq_marlin"}}])
def test_weights_that_no_scheme_quantizes_have_two_bytes(engine: dict[str, Any]) -> None:
    assert weights(engine) == 8 * BILLION


@pytest.mark.parametrize(
    ("scheme", "nbytes"), [("fp8_per_block", 1 + 4 / 128**2), ("mxfp4", 1 / 2 + 1 / 32)]
)
def test_the_layers_of_a_quantized_engine_are_smaller(scheme: str, nbytes: float) -> None:
    layers = 36 * SIZE.block
    expected = 2 * (4 * BILLION - layers) + layers * nbytes
    assert weights({"quantization": scheme}) == pytest.approx(expected, abs=2)
    assert weights({"extra": {"quantization": scheme}}) == pytest.approx(expected, abs=2)


def test_schemes_of_experts_leave_all_else() -> None:
    experts = 36 * 128 * 3 * 768 * 2560
    expected = 2 * 4 * BILLION - experts * (2 - 1.01)
    found = weights({"quantization": "int8_per_channel_weight_only"}, "mixture")
    assert found == pytest.approx(expected, abs=2)


def test_a_load_of_quantized_weights_has_both_forms_of_a_module() -> None:
    plain, quantized = (
        load("rollout", config(rollout={"engine": engine}, sync={"backend": "shared_memory"}))
        for engine in ({}, {"quantization": "fp8_per_block"})
    )
    module = 2 * 2 * 9728 * 2560
    table = 2 * 151_936 * 2560
    assert plain == max(table, module)
    assert quantized == max(table, int(module * (1.5 + 2 / 128**2)))


MB = 1_000_000
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
