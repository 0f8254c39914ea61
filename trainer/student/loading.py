"""Loads the student with transformers, set up to compute the logits that its engines compute.

directory ──from_pretrained──► float32, eval mode ──rotary factors──► attention ──► Learner

The model always stays in eval mode, with gradients: dropout, router noise and all else that a model
does only while ``training`` is true would make q differ from the student that was sampled.
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

    Attention is flash_attention_2 on a GPU under bfloat16 if it is installed; otherwise
    transformers' choice for the model (sdpa if it has it), or eager where sdpa would be wrong.
    """
    from transformers import AutoModelForCausalLM

    flash = _has_flash(device, config.train.dtype)
    model = AutoModelForCausalLM.from_pretrained(
        config.student.model,
        dtype=torch.float32,
        attn_implementation="flash_attention_2" if flash else None,
        trust_remote_code=config.student.trust_remote_code,
        use_safetensors=True,  # loading a pickle would run its code
    )
    pin_rotary(model, max_model_len(config.rollout.engine))
    settings = model.config.get_text_config()
    if not flash and getattr(settings, "attn_logit_softcapping", None):
        model.set_attn_implementation("eager")  # sdpa ignores the soft cap without an error
    if config.train.gradient_checkpointing:
        recompute_activations(model)
    return model.eval()


def recompute_activations(model: Any) -> None:
    """Keeps only the input of each decoder layer; the backward pass runs the layer again.

    transformers' own switch works in training mode only. StageError for a model without any
    ``GradientCheckpointingLayer``.
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
        recomputed = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
        layer.forward = partial(recomputed, layer.forward)


def _has_flash(device: torch.device, dtype: str) -> bool:
    from transformers.utils import is_flash_attn_2_available

    half = device.type == "cuda" and dtype != "float32"
    return half and bool(is_flash_attn_2_available())
