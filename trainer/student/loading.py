"""Loads the student with transformers, set up to compute the logits that its engines compute.

directory ──from_pretrained──► float32, eval mode ──rotary factors──► attention ──► Learner

The model always stays in eval mode, with gradients: dropout, router noise and all else that a model
does only while ``training`` is true would make q differ from the student that was sampled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from async_opd.models.rope import max_model_len
from trainer.notes import note
from trainer.student.adapters import add_adapters
from trainer.student.attention import FLASH, VARLEN, register
from trainer.student.attention_choice import Attention, Platform, choose_attention
from trainer.student.attention_probe import attention_needs, platform_of
from trainer.student.recomputation import set_recomputation
from trainer.student.rotary import pin_rotary

RECOMPILE_LIMIT = 32
"""Of one function. Flex attention needs two for each kind of mask, with gradients and without."""

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig


def load_student(config: RunConfig, device: torch.device) -> Any:
    """The model in float32, on the CPU, in eval mode, with the attention that trains on ``device``.

    StageError if no attention can compute packed rows of it there.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        config.student.model,
        dtype=torch.float32,
        trust_remote_code=config.student.trust_remote_code,
        use_safetensors=True,  # loading a pickle would run its code
    )
    pin_rotary(model, max_model_len(config.rollout.engine))
    if config.train.lora is not None:
        add_adapters(model, config.train.lora)
    half = in_bfloat16(config.train.dtype, device)
    set_attention(model, config.train.attention, platform_of(device, half))
    set_recomputation(model, config.train, device.type)
    return model.eval()


def set_attention(model: Any, wanted: Attention, platform: Platform) -> None:
    """Sets what computes the model's attention; see choose_attention.

    ``sdpa`` is eager where transformers has no sdpa for the model, or sdpa would be wrong.
    """
    settings = model.config.get_text_config()
    if wanted == "sdpa" or (wanted == "auto" and platform.device == "cpu"):
        if getattr(settings, "attn_logit_softcapping", None):
            model.set_attn_implementation("eager")  # sdpa ignores the soft cap without an error
        if platform.device != "cpu":
            note("attention of packed rows: sdpa, with a mask of each whole row for each layer")
        return
    kind = choose_attention(wanted, platform, attention_needs(model))
    register()
    names = {"varlen": VARLEN, "flash": FLASH, "flex": "flex_attention"}
    model.set_attn_implementation(names[kind])
    note(f"attention of packed rows: {kind}")
    if kind == "flex":
        refuse_eager_flex()


def refuse_eager_flex() -> None:
    """Makes too many compilations an error: torch would go on, with T² scores for each layer."""
    import torch._dynamo.config

    torch._dynamo.config.recompile_limit = RECOMPILE_LIMIT
    torch._dynamo.config.fail_on_recompile_limit_hit = True


def in_bfloat16(dtype: str, device: torch.device) -> bool:
    """Whether a student with this ``train.dtype`` computes in bfloat16 on the device."""
    return dtype == "bfloat16" or (dtype == "auto" and device.type == "cuda")
