"""The student as transformers loads it, set up to compute what the engines sampled from.

directory ──from_pretrained──► float32, eval mode ──rotary factors──► attention ──► Learner

The model stays in eval mode for good, with gradients: dropout, router noise and what else a family
does while its ``training`` is true would make q another student than the one that answered.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.checkpoint import checkpoint

from async_opd.core.errors import StageError
from async_opd.models.rope import max_model_len
from trainer.student.rotary import pin_rotary

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig


def load_student(config: RunConfig, device: torch.device) -> Any:
    """The model in float32, on the CPU, in eval mode.

    Attention: flash_attention_2 if it is installed, on a GPU under bfloat16; else what the model
    can compute: sdpa, or eager where sdpa would leave something out.
    """
    from transformers import AutoModelForCausalLM

    flash = _has_flash(device, config.train.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        config.student.model,
        dtype=torch.float32,
        attn_implementation="flash_attention_2" if flash else None,
        trust_remote_code=config.student.trust_remote_code,
        use_safetensors=True,  # never a pickle
    )
    pin_rotary(model, max_model_len(config.rollout.engine))
    settings = model.config.get_text_config()
    if not flash and getattr(settings, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa ignores the soft cap without a word
    if config.train.gradient_checkpointing:
        recompute_activations(model)
    return model.eval()


def recompute_activations(model: Any) -> None:
    """Keeps the input of each of the decoder's layers only; the backward pass runs it again.

    transformers' own switch works in training mode only. StageError for a model without layers
    that it could be done for.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    layers = [m for m in model.base_model.modules() if isinstance(m, GradientCheckpointingLayer)]
    if not layers:
        raise StageError(
            "trainer",
            f"{type(model).__name__} has no layers whose activations could be recomputed",
            "set train.gradient_checkpointing: false",
        )
    for layer in layers:
        again = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer.forward = partial(again, layer.forward)


def _has_flash(device: torch.device, dtype: str) -> bool:
    from transformers.utils import is_flash_attn_2_available

    half = device.type == "cuda" and dtype != "float32"
    return half and bool(is_flash_attn_2_available())
