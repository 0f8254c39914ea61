"""Which attention trains: a table of devices, precisions, models and packages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from async_opd.core.errors import StageError
from tests.trainer import families
from tests.trainer.models import tiny_model
from tests.trainer.test_attention import keep_limits
from trainer.student.attention import SEQUENCES, VARLEN
from trainer.student.attention_choice import (
    Attention,
    AttentionNeeds,
    Platform,
    attention_needs,
    choose_attention,
    platform_of,
)
from trainer.student.loading import set_attention

CPU = Platform("cpu")
GPU = Platform("cuda", (9, 0), half=True, varlen=True)
WITH_FLASH = replace(GPU, flash_attn=True)
SINGLE = replace(WITH_FLASH, half=False)
OLD = replace(WITH_FLASH, capability=(7, 5))
OLD_TORCH = replace(GPU, varlen=False)

PLAIN = AttentionNeeds(layers=2, lengths=True, head_dims=(128, 128))
CAPPED = replace(PLAIN, soft_cap=True)
SINKS = replace(PLAIN, others=frozenset({"s_aux"}))
SPARSE = replace(PLAIN, others=frozenset({"indices"}))
OTHER_MASK = replace(PLAIN, windows_known=False)
NO_LENGTHS = replace(PLAIN, lengths=False)
NO_FLEX = replace(PLAIN, flex=False)
WIDE = replace(PLAIN, head_dims=(512, 512))
ODD = replace(PLAIN, head_dims=(20, 20))
NARROW = replace(PLAIN, head_dims=(8, 8))
ITS_OWN = AttentionNeeds(layers=0, lengths=False, head_dims=(0, 0))
BIDIRECTIONAL = replace(PLAIN, others=frozenset({"is_causal=False"}), windows_known=False)

TABLE: list[tuple[str, Platform, AttentionNeeds, str]] = [
    ("auto", CPU, PLAIN, "sdpa"),
    ("auto", CPU, ITS_OWN, "sdpa"),
    ("auto", GPU, PLAIN, "varlen"),
    ("auto", WITH_FLASH, PLAIN, "varlen"),
    ("flash", WITH_FLASH, PLAIN, "flash"),
    ("flex", WITH_FLASH, PLAIN, "flex"),
    ("sdpa", WITH_FLASH, PLAIN, "sdpa"),
    ("sdpa", GPU, ITS_OWN, "sdpa"),
    ("auto", OLD_TORCH, PLAIN, "flex"),
    ("auto", replace(WITH_FLASH, varlen=False), PLAIN, "flash"),
    ("auto", GPU, CAPPED, "flex"),
    ("auto", WITH_FLASH, CAPPED, "flash"),
    ("auto", WITH_FLASH, SINKS, "flex"),
    ("auto", WITH_FLASH, OTHER_MASK, "flex"),
    ("auto", WITH_FLASH, NO_LENGTHS, "flex"),
    ("auto", WITH_FLASH, WIDE, "flex"),
    ("auto", WITH_FLASH, ODD, "flex"),
    ("auto", WITH_FLASH, NARROW, "varlen"),
    ("auto", SINGLE, PLAIN, "flex"),
    ("auto", OLD, PLAIN, "flex"),
    ("auto", GPU, NO_FLEX, "varlen"),
]

REFUSED: list[tuple[str, Platform, AttentionNeeds, str]] = [
    ("varlen", CPU, PLAIN, "trains on GPUs only"),
    ("flex", CPU, PLAIN, "trains on GPUs only"),
    ("flash", GPU, PLAIN, "flash-attn >= 2.6 is not installed"),
    ("varlen", OLD_TORCH, PLAIN, "no varlen_attn with windows"),
    ("varlen", GPU, CAPPED, "no soft cap"),
    ("varlen", SINGLE, PLAIN, "train.dtype: float32"),
    ("varlen", OLD, PLAIN, r"\(7, 5\)"),
    ("varlen", GPU, WIDE, "heads of 512"),
    ("flash", WITH_FLASH, SINKS, "s_aux"),
    ("flash", WITH_FLASH, OTHER_MASK, "masks are not the causal windows"),
    ("flex", GPU, NARROW, "narrower than 16"),
    ("auto", WITH_FLASH, SPARSE, "varlen: .*indices.*flash: .*indices.*flex: .*indices"),
    ("auto", WITH_FLASH, ITS_OWN, "does not call transformers' attention interface"),
    ("auto", WITH_FLASH, replace(ITS_OWN, fault="TypeError: x"), "TypeError: x"),
    ("auto", WITH_FLASH, replace(SINKS, flex=False), "transformers has none"),
    ("auto", WITH_FLASH, BIDIRECTIONAL, "is_causal=False"),
]


LINEAR = replace(PLAIN, other_layers=frozenset({"linear_attention"}))

ACROSS: list[tuple[str, Platform, AttentionNeeds, str]] = [
    ("auto", CPU, PLAIN, "sdpa"),
    ("auto", CPU, CAPPED, "sdpa"),
    ("auto", GPU, PLAIN, "varlen"),
    ("auto", WITH_FLASH, CAPPED, "flash"),
    ("sdpa", SINGLE, PLAIN, "sdpa"),
]
"""Of ranks that share rows."""

REFUSED_ACROSS: list[tuple[str, Platform, AttentionNeeds, str]] = [
    ("auto", CPU, SINKS, "sdpa: it does not know s_aux"),
    ("auto", CPU, ITS_OWN, "does not call transformers' attention interface"),
    ("auto", CPU, NO_LENGTHS, "does not pass the lengths"),
    ("auto", CPU, OTHER_MASK, "masks are not the causal windows"),
    ("auto", CPU, LINEAR, "layers of kind linear_attention pass on"),
    ("varlen", GPU, LINEAR, "varlen: layers of kind linear_attention"),
    ("flex", GPU, PLAIN, "flex: its masks are of a rank's own tokens"),
    ("auto", WITH_FLASH, SINKS, "varlen: .*s_aux.*flash: .*s_aux.*flex: its masks"),
]


@pytest.mark.parametrize(
    ("across", "wanted", "platform", "needs", "expected"),
    [*((False, *row) for row in TABLE), *((True, *row) for row in ACROSS)],
)
def test_the_first_that_computes_what_the_model_needs_is_chosen(
    across: bool, wanted: Any, platform: Platform, needs: AttentionNeeds, expected: str
) -> None:
    """Ranks that share rows choose one that needs no mask."""
    assert choose_attention(wanted, platform, needs, across=across) == expected


@pytest.mark.parametrize(
    ("across", "wanted", "platform", "needs", "reason"),
    [*((False, *row) for row in REFUSED), *((True, *row) for row in REFUSED_ACROSS)],
)
def test_what_cannot_be_computed_is_refused_with_the_reason(
    across: bool, wanted: Any, platform: Platform, needs: AttentionNeeds, reason: str
) -> None:
    with pytest.raises(StageError, match=reason) as error:
        choose_attention(wanted, platform, needs, across=across)
    remedy = error.value.remedy
    if across:
        assert remedy.startswith("set train.context_parallel: 1")
    else:
        assert ("train.attention: sdpa makes a mask" in remedy) == (platform != CPU)


def test_no_mask_of_a_whole_row_is_made_on_a_gpu_unless_it_is_asked_for() -> None:
    every = [GPU, WITH_FLASH, SINGLE, OLD, OLD_TORCH]
    models = [PLAIN, CAPPED, SINKS, SPARSE, OTHER_MASK, NO_LENGTHS, NO_FLEX, WIDE, ITS_OWN]
    for platform in every:
        for needs in models:
            try:
                assert choose_attention("auto", platform, needs) != "sdpa"
            except StageError:
                continue


# ── what models need ───────────────────────────────────────────────────────────────────────────

NEEDS: dict[str, tuple[Any, AttentionNeeds]] = {
    "Qwen3": (tiny_model, replace(PLAIN, head_dims=(16, 16))),
    "Gemma 2": (families.gemma2, replace(CAPPED, head_dims=(16, 16))),
    "Gemma 3": (families.gemma3, replace(PLAIN, head_dims=(16, 16))),
    "Gemma 4": (families.gemma4, replace(PLAIN, layers=4, head_dims=(32, 32))),
    "gpt-oss": (families.gpt_oss, replace(SINKS, head_dims=(16, 16))),
    "Mistral": (lambda: families.mistral(3), replace(PLAIN, head_dims=(16, 16))),
    "DeepSeek V3": (families.deepseek, replace(PLAIN, head_dims=(24, 16))),
    "Nemotron": (lambda: families.made("Nemotron"), replace(NO_LENGTHS, head_dims=(16, 16))),
}


@pytest.mark.parametrize("name", NEEDS)
def test_a_model_is_asked_what_its_attention_needs(name: str) -> None:
    make, expected = NEEDS[name]
    assert attention_needs(make().eval()) == expected


def test_a_model_with_an_attention_of_its_own_has_no_layers() -> None:
    assert attention_needs(families.made("Bloom")).layers == 0


def test_a_window_that_only_the_mask_has_is_seen() -> None:
    """A kernel without masks would attend to all tokens in such a layer."""
    model = families.mistral(3)
    for layer in model.base_model.layers:
        forward = layer.self_attn.forward
        layer.self_attn.forward = without_window(forward, layer.self_attn)
    assert not attention_needs(model).windows_known


def without_window(forward: Any, module: Any) -> Any:
    def call(**arguments: Any) -> Any:
        module.config = copy.copy(module.config)
        module.config.sliding_window = None
        return forward(**arguments)

    return call


def test_the_model_gets_the_attention_that_was_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    keep_limits(monkeypatch)
    model = tiny_model()
    set_attention(model, "auto", GPU)
    assert model.config._attn_implementation == VARLEN
    set_attention(model, "flex", GPU)
    assert model.config._attn_implementation == "flex_attention"


@pytest.mark.parametrize(
    ("make", "wanted", "expected"),
    [
        (tiny_model, "auto", SEQUENCES),
        (families.gemma2, "auto", SEQUENCES),
        (tiny_model, "sdpa", "sdpa"),
        (families.gemma2, "sdpa", "eager"),  # sdpa ignores its soft cap
    ],
)
def test_a_cpu_computes_sequences_apart_where_the_model_passes_their_lengths_on(
    make: Callable[[], Any], wanted: Attention, expected: str
) -> None:
    model = make()
    set_attention(model, wanted, platform_of(torch.device("cpu"), False))
    assert model.config._attn_implementation == expected


def test_this_torch_has_varlen_with_windows() -> None:
    assert platform_of(torch.device("cpu"), False) == Platform("cpu", varlen=True)
