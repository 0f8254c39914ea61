"""The planner's terms by themselves: what shards, what recomputation and adapters save."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from async_opd.memory import pools, step
from async_opd.memory.pools import ON_HOST
from async_opd.memory.step import Step, backward, kept_activations, loss, peak, states
from async_opd.models.model_size import NOT_RECOMPUTED, ModelSize, tensors_of
from tests.checks.inputs import MODELS
from trainer.learner import CPU_ROW_TOKENS
from trainer.losses.chunked import CHUNK_BYTES
from trainer.losses.compiled import TILE_BYTES

SIZE = ModelSize(
    4_022_000_000, 0, 2560, 9728, 36, 151_936, embeddings=151_936, query=4096, key=1024, heads=32,
    query_norms=True,
)  # fmt: skip


def test_the_planner_has_the_trainers_chunks_tiles_and_rows() -> None:
    assert step.CHUNK == CHUNK_BYTES
    assert step.TILE == TILE_BYTES
    assert pools.CPU_ROW_TOKENS == CPU_ROW_TOKENS


@given(st.integers(1, 64), st.integers(256, 65536), st.booleans())
def test_twice_the_ranks_need_half_the_states(ranks: int, tokens: int, half: bool) -> None:
    one = Step(SIZE, ranks=ranks, tokens=tokens, responses=tokens, half=half)
    two = replace(one, ranks=2 * ranks)
    for term, nbytes in states(two).items():
        assert nbytes == pytest.approx(states(one)[term] / 2, abs=1)
    if ranks > 1:
        assert sum(peak(two).values()) < sum(peak(one).values())


@given(st.integers(1, 64), st.integers(256, 65536))
def test_the_more_is_computed_again_the_less_is_kept(ranks: int, tokens: int) -> None:
    kinds = [
        replace(Step(SIZE, ranks=ranks, tokens=tokens), recompute=kind)
        for kind in ("none", "selective", "full")
    ]
    none, selective, full = map(kept_activations, kinds)
    assert none > selective > full


def test_the_peak_is_the_larger_of_the_loss_and_the_backward_pass() -> None:
    for tokens in (64, 65536):
        made = Step(SIZE, ranks=8, tokens=tokens, responses=64)
        totals = [sum(states(made).values()) + sum(of(made).values()) for of in (loss, backward)]
        assert sum(peak(made).values()) == max(totals)


def test_only_adapters_have_gradients_and_moments() -> None:
    terms = states(Step(SIZE, trained=1_000_000))
    assert terms["gradients"] == 4_000_000
    assert terms["moments"] == 8_000_000
    assert terms["parameters"] == 2 * SIZE.floats + 4_000_000
    terms = states(Step(SIZE, moment_bytes=2, on_host=frozenset({"parameters"})))
    assert terms["moments"] == 2 * SIZE.floats
    assert "parameters" not in terms


def test_the_size_of_a_model_is_read_from_its_config_and_the_headers_of_its_files() -> None:
    size = ModelSize.read(MODELS / "student")
    stored = sum(file.stat().st_size for file in (MODELS / "student").glob("*.safetensors"))
    assert size.engine_bytes("bfloat16") == pytest.approx(stored, rel=0.05)
    assert size.engine_bytes("float32") == 2 * size.engine_bytes("bfloat16")
    assert (size.norms, size.gated, size.query_norms, size.experts) == (2, True, True, 0)
    layers = [n for n, *_ in tensors_of(Path(MODELS / "student")) if ".layers.0." in n]
    assert layers
    table = size.embeddings * size.hidden
    assert size.outside == size.hidden  # the last norm
    assert size.block * size.layers + table + size.outside == size.floats


def test_transformers_has_no_layers_to_recompute_for_the_families_that_are_named() -> None:
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    def recomputable(kind: str) -> bool:
        folder = model_type_to_module_name(kind)
        source = Path(transformers.__file__).parent / "models" / folder / f"modeling_{folder}.py"
        return "GradientCheckpointingLayer" in source.read_text()

    assert [kind for kind in sorted(NOT_RECOMPUTED) if recomputable(kind)] == []
    assert all(recomputable(kind) for kind in ("qwen3", "llama", "gemma2", "gpt2"))


@pytest.mark.parametrize("offload", ["none", "moments", "parameters"])
def test_gradients_reduced_once_are_whole_on_every_gpu(offload: str) -> None:
    terms = peak(Step(SIZE, ranks=8, reduces_once=True, on_host=ON_HOST[offload]))
    assert terms["gradients"] == 4 * SIZE.floats
