"""``train``: moments that decay, and the layers that adapters are of."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from async_opd.config.sections.train import LoraConfig, TrainConfig


@pytest.mark.parametrize("moments", ["float32", "8bit"])
def test_moments_that_are_not_in_bfloat16_may_decay_slowly(moments: Any) -> None:
    assert TrainConfig(moments=moments, betas=(0.9, 0.9999)).moments == moments


def test_moments_in_bfloat16_decay_within_their_8_bits() -> None:
    with pytest.raises(ValidationError, match="significant bits round away how moments decay"):
        TrainConfig(moments="bfloat16", betas=(0.9, 0.9999))


@pytest.mark.parametrize("mixture", [False, True])
def test_experts_of_a_mixture_have_no_adapters(mixture: bool) -> None:
    layers = ["layers.0.self_attn.q_proj", "layers.0.mlp.gate_proj"]
    assert LoraConfig(rank=4).adapted(layers, mixture) == layers[: 1 if mixture else 2]
