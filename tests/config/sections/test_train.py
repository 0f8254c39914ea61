"""``train`` and ``checkpoint``: what they refuse, and bounds that follow from them."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from async_opd.config.sections.reliability import CheckpointConfig
from async_opd.config.sections.train import LoraConfig, TrainConfig


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_moments_of_more_bits_may_decay_slowly(moments: Any) -> None:
    assert TrainConfig(moments=moments, betas=(0.9, 0.9999)).moments == moments


def test_moments_in_bfloat16_decay_within_their_8_bits() -> None:
    with pytest.raises(ValidationError, match="significant bits round away how moments decay"):
        TrainConfig(moments="bfloat16", betas=(0.9, 0.9999))


@pytest.mark.parametrize("mixture", [False, True])
def test_experts_of_a_mixture_have_no_adapters(mixture: bool) -> None:
    layers = ["layers.0.self_attn.q_proj", "layers.0.mlp.gate_proj"]
    assert LoraConfig(rank=4).adapted(layers, mixture) == layers[: 1 if mixture else 2]


def test_a_checkpoints_timeout_grows_with_its_bytes() -> None:
    """30 s, and 4 MiB at 2 MiB/s."""
    assert CheckpointConfig(timeout_s=30, min_mib_per_s=2).bound_s(4 << 20) == 32
