"""Where the output head of a model is found, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from async_opd.models.lm_head import HeadFiles
from async_opd.models.model_files import ModelError

EMBEDDING = {"model.embed_tokens.weight": np.zeros((7, 3), np.float32)}
HEAD = {"lm_head.weight": np.ones((7, 3), np.float32)}
OTHER = {"model.layers.0.mlp.up_proj.weight": np.zeros((5, 3), np.float32)}


def model(path: Path, *shards: dict[str, Any], **config: Any) -> Path:
    """A model directory of one or several files."""
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    if len(shards) == 1:
        save_file(shards[0], path / "model.safetensors")
        return path
    weight_map = {}
    for number, shard in enumerate(shards):
        save_file(shard, path / f"part{number}.safetensors")
        weight_map |= dict.fromkeys(shard, f"part{number}.safetensors")
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_the_quickstarts_head_is_its_embedding(quickstart: str) -> None:
    head = HeadFiles.read(f"{quickstart}/models/teacher-sort")
    assert (head.weight.name, head.vocabulary, head.hidden) == (
        "model.embed_tokens.weight",
        128,
        128,
    )


@pytest.mark.parametrize(
    ("shards", "tied", "name", "file"),
    [
        ([EMBEDDING | HEAD | OTHER], True, "model.embed_tokens.weight", "model.safetensors"),
        ([EMBEDDING | HEAD | OTHER], False, "lm_head.weight", "model.safetensors"),
        ([EMBEDDING | HEAD | OTHER], None, "lm_head.weight", "model.safetensors"),
        ([EMBEDDING | OTHER], None, "model.embed_tokens.weight", "model.safetensors"),
        ([EMBEDDING | OTHER, HEAD], False, "lm_head.weight", "part1.safetensors"),
    ],
    ids=["tied", "not tied", "not said", "not said without a head", "several files"],
)
def test_a_model_says_whether_its_embedding_is_its_head(
    tmp_path: Path, shards: list[dict[str, Any]], tied: bool | None, name: str, file: str
) -> None:
    found = HeadFiles.read(model(tmp_path / "m", *shards, tie_word_embeddings=tied)).weight
    assert (found.name, found.file) == (name, tmp_path / "m" / file)


def test_a_language_model_inside_of_a_larger_one_is_found(tmp_path: Path) -> None:
    inner = {"model.language_model.embed_tokens.weight": np.zeros((7, 3), np.float32)}
    text = {"tie_word_embeddings": True, "final_logit_softcapping": 30.0}
    head = HeadFiles.read(model(tmp_path / "m", inner | OTHER, text_config=text))
    assert (head.vocabulary, head.shape.soft_cap) == (7, 30.0)


def test_a_bias_of_the_head_is_found(tmp_path: Path) -> None:
    bias = {"lm_head.bias": np.zeros(7, np.float32)}
    head = HeadFiles.read(model(tmp_path / "m", HEAD | bias, tie_word_embeddings=False))
    assert head.bias is not None
    assert head.bias.name == "lm_head.bias"


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 1.0),
        ({"logit_scale": 0.25}, 0.25),
        ({"logits_scaling": 8.0, "model_type": "granite"}, 0.125),
        ({"logits_scaling": 8.0, "model_type": "hyperclovax"}, 8.0),
        ({"lm_head_multiplier": 0.5}, 0.5),
        ({"logit_scale": None}, 1.0),
    ],
)
def test_logits_are_scaled_as_they_should(
    tmp_path: Path, config: dict[str, Any], scale: float
) -> None:
    assert HeadFiles.read(model(tmp_path / "m", HEAD, **config)).shape.scale == scale


TWO = HEAD | {"talker.lm_head.weight": np.ones((7, 3), np.float32)}


@pytest.mark.parametrize(
    ("weights", "config", "cause"),
    [
        (HEAD, {"dim_model_base": 256}, "dim_model_base"),
        (EMBEDDING, {"tie_word_embeddings": False}, "found none"),
        (TWO, {}, r"lm_head.weight, talker\.lm_head\.weight"),
        (None, {}, "cannot be read"),
    ],
    ids=["another path to its logits", "no head", "two heads", "broken weights"],
)
def test_a_model_without_one_head_that_can_be_read_is_refused(
    tmp_path: Path, weights: dict[str, Any] | None, config: dict[str, Any], cause: str
) -> None:
    path = model(tmp_path / "m", weights or HEAD, **config)
    if weights is None:
        (path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ModelError, match=cause):
        HeadFiles.read(path)
