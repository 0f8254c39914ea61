"""Published names and values are those of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer.models import tiny_model
from trainer.student.named_weights import named_weights


def mixture() -> Any:
    """Two experts, which transformers fuses in memory; the head is not tied."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            tie_word_embeddings=False,
        )
    )


@pytest.mark.parametrize("build", [tiny_model, mixture])
def test_weights_are_those_of_the_checkpoint(build: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = build()
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    published = dict(named_weights(model, torch.float32))
    assert published.keys() == written.keys()
    assert all(torch.equal(published[name], written[name]) for name in written)


def test_a_tied_head_is_published_once() -> None:
    names = [name for name, _ in named_weights(tiny_model(), torch.float32)]
    assert "lm_head.weight" not in names


def test_a_head_of_its_own_is_published() -> None:
    names = [name for name, _ in named_weights(mixture(), torch.float32)]
    assert "lm_head.weight" in names


def test_weights_travel_in_the_wire_dtype() -> None:
    assert {w.dtype for _, w in named_weights(tiny_model(), torch.bfloat16)} == {torch.bfloat16}
