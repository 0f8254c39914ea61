"""Model FLOPs against those that ``torch.utils.flop_counter`` counts in forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from tests.trainer.families import made
from tests.trainer.models import random_sample
from trainer.batches.packing import pack
from trainer.losses import ForwardKL, Objective, OnTopK
from trainer.student.loss_module import StudentLoss
from trainer.utilization import ModelSize, attended

PROMPT, RESPONSES = 12, (20, 8)
LENGTHS = tuple(PROMPT + response for response in RESPONSES)


Shape = tuple[int, int]


def product(_: Shape, left: Shape, right: Shape, **others: Any) -> int:
    """FLOPs of ``addmm_``; flop_counter has no formula for it, which sums the head's gradient."""
    return 2 * left[0] * left[1] * right[1]


def counted(model: Any, responses: Sequence[int]) -> int:
    """FLOPs of the dispatched products of each sequence alone; eager attention computes all T²."""
    model.set_attn_implementation("eager")
    model.set_experts_implementation("eager")  # flop_counter does not know grouped products
    student = StudentLoss(model, Objective(OnTopK(ForwardKL(), "bucket", None)), {})
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: product})
    with counter:
        for index, response in enumerate(responses):
            loss, _ = student(pack([random_sample(index, response, k=6, prompt=PROMPT)]))
            loss.backward()
    return counter.get_total_flops()


def masked(size: ModelSize, lengths: Sequence[int]) -> int:
    """FLOPs of the pairs that eager attention computes and the mask then discards."""
    layers = zip(size.attention, size.windows, strict=True)
    return sum(6 * wide * (n * n - attended(n, window)) for wide, window in layers for n in lengths)


GEMMA4 = {
    "head_dim": 16,
    "global_head_dim": 32,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention"],
    "vocab_size_per_layer_input": 32,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "untied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "biases": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "windows": ("Mistral", {"sliding_window": 7}),
    "windows of some layers": ("Gemma2", {"head_dim": 16, "sliding_window": 5}),
    "two experts of four": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "one expert of four": (
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 1,
            "moe_intermediate_size": 24,
            "decoder_sparse_step": 1,
        },
    ),
    "wider heads without windows": ("Gemma4", GEMMA4),
    "experts under another name": (
        "Gemma4",
        {
            **GEMMA4,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_model_flops_are_the_dispatched_ones_without_masked_pairs(family: str) -> None:
    name, settings = FAMILIES[family]
    model = made(name, **settings)
    size = ModelSize.of(model)
    expected = counted(model, RESPONSES) - masked(size, LENGTHS)
    assert size.training_flops(LENGTHS, RESPONSES) == expected


@given(tokens=st.integers(0, 60), window=st.none() | st.integers(1, 70))
def test_attended_counts_the_pairs_of_a_causal_mask(tokens: int, window: int | None) -> None:
    reach = window or tokens
    pairs = [(i, j) for i in range(tokens) for j in range(i + 1) if i - j < reach]
    assert attended(tokens, window) == len(pairs)


def test_a_prompt_alone_costs_no_head() -> None:
    size = ModelSize(decoder=100, head=7, attention=(3,), windows=(None,))
    assert size.training_flops([4], [0]) == 6 * (100 * 4 + 3 * 10)
    assert size.training_flops([4], [2]) - size.training_flops([4], [0]) == 6 * 7 * 2


def test_a_frozen_matrix_costs_two_thirds_and_an_unknown_model_its_tokens() -> None:
    model = made("Qwen3", head_dim=16)
    full = ModelSize.of(model)
    model.requires_grad_(False)
    frozen = ModelSize.of(model)
    assert frozen.decoder == pytest.approx(full.decoder * 2 / 3, rel=1e-3)
    assert frozen.head == full.head * 2 // 3
    model.config = Refusing()
    size = ModelSize.of(model)
    assert size.unknown == "RuntimeError: 'head_dim' is a per-layer attribute"
    assert size.training_flops([8], [4]) == 2 * size.training_flops([4], [4]) > 0


class Refusing:
    """A config that cannot be read."""

    def get_text_config(self) -> Any:
        raise RuntimeError("'head_dim' is a per-layer attribute")
