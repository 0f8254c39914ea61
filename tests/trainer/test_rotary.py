"""Rotary frequencies are the engines', whatever a sample is packed with."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from async_opd.core.errors import StageError
from tests.trainer import families
from trainer.student.check import check_student
from trainer.student.loading import pin_rotary

CPU = torch.device("cpu")


def phimoe() -> Any:
    rope = {**families.LONGROPE, "short_mscale": 1.1, "long_mscale": 1.4}
    return families.phimoe(num_key_value_heads=2, max_position_embeddings=128, rope_parameters=rope)


LONG = {"Phi3": families.phi3, "PhiMoE": phimoe}


def logits(model: Any, count: int) -> torch.Tensor:
    """Of tokens at positions 0, 1, …, [count, V]."""
    ids = torch.arange(count)[None] % 29 + 1
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=ids, use_cache=False).logits[0]
    return found


@pytest.mark.parametrize("name", LONG)
def test_the_check_finds_factors_that_depend_on_the_longest_position(name: str) -> None:
    with pytest.raises(StageError, match="packed logits"):
        check_student(LONG[name]())


@pytest.mark.parametrize("length", [None, 32, 33, 128])
@pytest.mark.parametrize("name", LONG)
def test_pinned_factors_pass_the_check(name: str, length: int | None) -> None:
    model = LONG[name]()
    check_student(model, pin_rotary(model, length))


@pytest.mark.parametrize("name", LONG)
def test_logits_do_not_depend_on_later_positions(name: str) -> None:
    model = LONG[name]()
    pin_rotary(model, 128)
    assert torch.allclose(logits(model, 20), logits(model, 60)[:20], atol=1e-5)


def test_engines_that_hold_more_than_the_original_positions_have_the_long_factors() -> None:
    """As transformers has for a sequence beyond them."""
    reference, model = families.phi3(), families.phi3()
    expected = logits(reference, 40)
    pin_rotary(model, 33)
    assert torch.allclose(logits(model, 40), expected, atol=1e-5)
    assert not torch.allclose(logits(model, 20), logits(reference, 20), atol=1e-2)


def test_engines_that_hold_no_more_have_the_short_factors() -> None:
    reference, model = families.phi3(), families.phi3()
    expected = logits(reference, 20)
    assert pin_rotary(model, None) == 32
    assert torch.equal(logits(model, 20), expected)


def test_the_config_stays_and_frequencies_by_layer_are_refused() -> None:
    model = families.phi3()
    pin_rotary(model, 128)
    assert model.config.to_dict() == families.phi3().config.to_dict()
    model.base_model.rotary_emb.rope_type = {"full_attention": "longrope"}
    with pytest.raises(StageError, match="by layer"):
        pin_rotary(model, 64)


def test_dynamic_frequencies_never_grow() -> None:
    model = families.dynamic_ntk()
    with pytest.raises(StageError, match="packed logits"):
        check_student(model, 64)
    pin_rotary(model, 32)
    check_student(model, 64)


def test_dynamic_scaling_beyond_the_positions_of_the_model_is_refused() -> None:
    with pytest.raises(StageError, match="max_model_len 64 is beyond the 32 positions"):
        pin_rotary(families.dynamic_ntk(), 64)
