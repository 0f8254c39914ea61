"""The student as transformers loads it, checked to be one that this trainer computes correctly.

directory ──from_pretrained──► float32 model ──no dropout──► check_student ──► Learner
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from async_opd.core.errors import StageError

if TYPE_CHECKING:
    from async_opd.core.config import RunConfig

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 5e-2}
"""Largest difference of logits that rounding explains, as a share of the largest logit (or 1)."""


def load_student(config: RunConfig, device: torch.device) -> Any:
    """The model in float32, on the CPU, without dropout.

    Attention: flash_attention_2 if it is installed, on a GPU under bfloat16; else sdpa.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        config.student.model,
        dtype=torch.float32,
        attn_implementation=_attention(device, config.train.dtype),
        trust_remote_code=config.student.trust_remote_code,
        use_safetensors=True,  # never a pickle
    )
    disable_dropout(model)
    if config.train.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model


def disable_dropout(model: Any) -> None:
    """Rollouts were sampled without dropout: with it, q would not be the student that answered."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "attention_dropout", None), float):
            module.attention_dropout = 0.0


def check_student(model: Any, device: torch.device, precision: AbstractContextManager[Any]) -> None:
    """Compares two packed sequences, decoder then head, with each through the whole model.

    StageError if they differ: the architecture changes its logits after the head (soft-capping,
    scaling), or lets packed sequences see each other (recurrent state). Either trains silently
    wrong. Costs three forward passes of at most 12 tokens.
    """
    lengths = (7, 5)
    vocabulary = model.get_output_embeddings().weight.shape[0]
    ids = [torch.arange(1, n + 1, device=device)[None] % vocabulary for n in lengths]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths])[None]
    model.eval()
    with torch.no_grad(), precision:
        alone = torch.cat([model(input_ids=one, use_cache=False).logits[0] for one in ids]).float()
        states = model.base_model(
            input_ids=torch.cat(ids, dim=1), position_ids=positions, use_cache=False
        ).last_hidden_state[0]
        packed = model.get_output_embeddings()(states)
        tolerance = TOLERANCE[packed.dtype] * max(1.0, float(alone.abs().max()))
        difference = float((packed.float() - alone).abs().max())
    if not difference <= tolerance:
        raise StageError(
            "trainer",
            f"packed logits of {type(model).__name__} differ from the model's own by "
            f"{difference:.3g} (rounding explains {tolerance:.3g})",
            "this architecture post-processes its logits or cannot be packed; it is not supported",
        )


def _attention(device: torch.device, dtype: str) -> str:
    from transformers.utils import is_flash_attn_2_available

    half = device.type == "cuda" and dtype != "float32"
    return "flash_attention_2" if half and is_flash_attn_2_available() else "sdpa"
