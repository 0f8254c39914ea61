"""Widths, tables and caches of models whose layers differ, by config.json and names of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_opd.models.model_files import ModelError, layers_of
from async_opd.models.model_size import ModelSize, Tensor

KINDS = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
SETTINGS: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "layer_types": KINDS,
}
PUBLISHED = {"global_head_dim": 64, "num_global_key_value_heads": 2}
WRITTEN = {
    "per_layer_config": {str(at): {"head_dim": 64, "num_key_value_heads": 2} for at in (1, 3)}
}
WIDE, NARROW = (2, 2 * 64), (4, 2 * 16)


def size(tensors: list[Tensor] | None = None, **settings: Any) -> ModelSize:
    return ModelSize.of({**SETTINGS, **settings}, tensors or [])


@pytest.mark.parametrize("settings", [PUBLISHED, WRITTEN])
def test_widths_are_of_the_widest_layer_in_both_forms(settings: dict[str, Any]) -> None:
    found = size(**settings)
    assert (found.query, found.key, found.heads) == (8 * 64, 2 * 64, 8)
    assert found.caches == (NARROW, WIDE, NARROW, WIDE)


def test_heads_of_keys_differ_only_where_keys_are_values_too() -> None:
    settings = {**SETTINGS, **PUBLISHED, "attention_k_eq_v": False}
    assert [one["num_key_value_heads"] for one in layers_of(settings)] == [4, 4, 4, 4]
    assert [one["head_dim"] for one in layers_of(settings)] == [16, 64, 16, 64]


LATENT = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 192}


@pytest.mark.parametrize(
    ("settings", "caches"),
    [
        ({**PUBLISHED, "num_kv_shared_layers": 2}, (NARROW, WIDE)),
        (LATENT, ((1, 576),) * 4),
        ({"num_hidden_layers": None}, ()),
    ],
    ids=["the keys of others", "one compressed head", "an unknown number of layers"],
)
def test_layers_keep_their_own_keys(settings: dict[str, Any], caches: tuple[Any, ...]) -> None:
    found = size(**settings)
    assert found.caches == caches
    if not caches:
        assert (found.query, found.key) == (8 * 16, 4 * 16)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("per_layer_config", [1]),
        ("per_layer_config", {"1": [1]}),
        ("layer_types", 3),
        ("num_hidden_layers", "4"),
    ],
)
def test_settings_of_another_type_count_as_missing(key: str, value: Any) -> None:
    found = layers_of({**SETTINGS, **PUBLISHED, key: value})
    assert [one.get("head_dim") for one in found] in ([], [16] * 4, [16, 64, 16, 64])


@pytest.mark.parametrize("key", ["num_experts_per_tok", "top_k_experts"])
def test_active_experts_are_read_under_both_names(key: str) -> None:
    found = size(num_experts=8, **{key: 2})
    assert (found.experts, found.active) == (8, 2)


def test_a_table_beside_the_embedding_is_no_part_of_a_layer() -> None:
    layer = [(f"model.layers.{at}.mlp.up_proj.weight", (64, 32), "BF16") for at in range(4)]
    tables = [
        ("model.embed_tokens.weight", (100, 32), "BF16"),
        ("model.embed_tokens_per_layer.weight", (100, 4 * 8), "BF16"),
    ]
    found = size([*layer, *tables])
    assert (found.block, found.outside, found.embeddings) == (64 * 32, 100 * 32, 100)
    assert found.tied


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", json.dumps({"hidden_size": "wide"})),
        ("model.safetensors", "{{ 1 / 0 }}"),
        ("model.safetensors.index.json", json.dumps({"weight_map": [1]})),
    ],
)
def test_a_model_whose_files_cannot_be_read_is_an_error_with_its_folder(
    tmp_path: Path, name: str, content: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SETTINGS))
    (tmp_path / name).write_text(content)
    with pytest.raises(ModelError, match=f"the size of {tmp_path} cannot be read"):
        ModelSize.read(tmp_path)
