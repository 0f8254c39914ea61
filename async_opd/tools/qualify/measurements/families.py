"""Packed rows of tiny random students of many families, on the device, as they are trained.

For each family and kind of attention the check of ``trainer.student.check`` compares packed rows
with the same sequences alone, computed eagerly, and one backward pass has finite gradients.

    attends      the kind that the trainer chose by ``auto``, or was given
    skipped      the trainer refuses the student, or this kind of attention, with its reason
    norm_ratio   the gradient's norm over that in float32 on the CPU, of the same packed row
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from async_opd.core.errors import StageError
from async_opd.tools.qualify.measurements.measuring import Figures, Report, Skip
from async_opd.tools.qualify.measurements.rank import ATTENTION, attend
from async_opd.tools.qualify.measurements.students import TrainSettings, micro_batch, rank_of
from trainer.student.attention_choice import Attention
from trainer.student.check import check_placed, check_student

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
MIXED = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 3}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48}
FAMILIES: dict[str, dict[str, Any]] = {
    "Qwen3": {"head_dim": 32},
    "Qwen2": {},
    "Llama": {"head_dim": 16},
    "Mistral": {"head_dim": 16, "sliding_window": 3},
    "Gemma3": {"head_dim": 32, **MIXED},
    "Granite": {"logits_scaling": 4.0},
    "Cohere2": {"logit_scale": 0.25, **MIXED},
    "Olmo2": {},
    "Olmo3": MIXED,
    "Phi3": {},
    "Starcoder2": {"use_bias": True},
    "StableLm": {},
    "Glm4": {"head_dim": 16},
    "SmolLM3": {},
    "Exaone4": {"head_dim": 16, "sliding_window": 3, "sliding_window_pattern": 2},
    "SeedOss": {"head_dim": 16},
    "Ministral": {"head_dim": 16, **MIXED},
    "Qwen3Moe": {"head_dim": 32, "num_experts": 4, **EXPERTS},
    "Mixtral": {"num_local_experts": 4},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2},
    "DeepseekV3": {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        **EXPERTS,
    },
    "Gemma2": {"head_dim": 32, "attn_logit_softcapping": 1.0, **MIXED},
}
"""Settings by transformers' name of the family. Of those with a window it is shorter than a row."""
LENGTHS = [40, 9, 23, 5]
MAX_NORM = 1e9


def made(family: str) -> Any:
    """The student in float32, on the CPU. Skip for a family that this transformers lacks."""
    import transformers

    torch.manual_seed(0)
    name = f"{family}Text" if family == "Gemma3" else family
    config = getattr(transformers, f"{name}Config", None)
    if config is None:
        raise Skip(f"transformers has no {name}Config")
    settings = config(**{**SIZES, **FAMILIES[family]})
    return getattr(transformers, f"{family}ForCausalLM")(settings).eval()


def gradient_norm(model: Any, device: torch.device) -> float:
    """Of one packed row, not clipped."""
    rank = rank_of(model, device, train=replace(TrainSettings(), max_grad_norm=MAX_NORM))
    norm = rank.backward([micro_batch(rank, LENGTHS)]).norm
    rank.apply(None)
    return norm


@cache
def checked(family: str) -> tuple[Any, torch.Tensor, float]:
    """The student; its exact logits and its gradient's norm, on the CPU. Skip if it is refused."""
    model, host = made(family), torch.device("cpu")
    attend(model, "auto", host)
    try:
        exact = check_student(model)
    except StageError as error:
        raise Skip(error.cause) from error
    return model, exact, gradient_norm(model, host)


def measure(family: str, attention: Attention, device: torch.device) -> Figures:
    """One family with one kind of attention on the device. StageError where its logits differ."""
    known, exact, norm = checked(family)
    model = copy.deepcopy(known).to(device)
    attend(model, attention, device)
    check_placed(rank_of(model, device).student, exact)
    on_device = gradient_norm(model, device)
    return {"attends": model.config._attn_implementation, "norm_ratio": on_device / norm}


def main(report: Report) -> None:
    """See the module."""
    device = report.device
    torch.set_num_threads(1)  # of the tiny students on the CPU
    kinds: tuple[Attention, ...] = ("auto", *ATTENTION) if device.type == "cuda" else ("auto",)
    for kind in kinds:
        for family in FAMILIES:
            work: Callable[[], Figures] = partial(measure, family, kind, device)
            report.cell(work, what="families", family=family, attention=kind)
