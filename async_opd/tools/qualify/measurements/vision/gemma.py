"""A Gemma 3 with random weights, saved as the hub has it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from async_opd.models import torchvision_operators

BEGIN, END, IMAGE = OF_IMAGES = ("<start_of_image>", "<end_of_image>", "<image_soft_token>")
LINES = ("\n", "\n\n", "\n\n\n", "\n\n\n\n")
"""Gemma's processor adds two ends of lines on each side of an image, and vLLM joins them."""
MERGES = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n")]
NAMES = {"boi_token": BEGIN, "eoi_token": END, "image_token": IMAGE}
"""Of the tokenizer's attributes."""
OF_TOWER = ("vision_tower", "projector")

TEXT: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "query_pre_attn_scalar": 32,
    "sliding_window": 64,
    "layer_types": ["sliding_attention", "full_attention"],
    "initializer_range": 0.2,
}
"""Of a tiny decoder; ``TOWER``: of its tower, where an image is 16 tokens."""
TOWER: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
    "patch_size": 7,
}


def tokenizer() -> Any:
    """Of images and ends of lines alone."""
    from tokenizers import AddedToken, Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    special = ("<pad>", "<eos>", "<bos>", "<unk>", *OF_IMAGES)
    ids = {token: at for at, token in enumerate((*special, *LINES))}
    core = Tokenizer(models.BPE(ids, MERGES, unk_token="<unk>"))
    core.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    named = {f"{one}_token": f"<{one}>" for one in ("pad", "eos", "bos", "unk")}
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        **named,
        extra_special_tokens=NAMES,
        clean_up_tokenization_spaces=False,
    )


def saved(
    folder: Path,
    tokenizer: Any,
    text: Mapping[str, Any] = TEXT,
    tower: Mapping[str, Any] = TOWER,
    tokens: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """The model in ``folder``, with its processor; ``tokens`` of each image."""
    torchvision_operators.install()
    import transformers

    ids = {f"{name}_index": tokenizer.convert_tokens_to_ids(one) for name, one in NAMES.items()}
    special = {f"{one}_token_id": getattr(tokenizer, f"{one}_token_id") for one in ("bos", "eos")}
    special["pad_token_id"] = tokenizer.pad_token_id
    config = transformers.Gemma3Config(
        text_config=transformers.Gemma3TextConfig(**{**text, **special}),
        vision_config=transformers.SiglipVisionConfig(**tower, vision_use_head=False),
        mm_tokens_per_image=tokens,
        **ids,
    )
    size = {"height": tower["image_size"], "width": tower["image_size"]}
    processor = transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(size=size),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=tokens,
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config).to(dtype).eval()
    with torch.no_grad():  # the projector starts with zeros, which would hide images
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and any(part in name for part in OF_TOWER):
                weight.copy_(torch.randn_like(weight) / weight.shape[-1] ** 0.5)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return as_on_the_hub(folder)


def as_on_the_hub(folder: Path) -> Path:
    """The weights of a tower by the hub's names, the only ones that vLLM 0.32 loads.

    transformers 5.19 reads both, and gives a new model names without ``vision_model``.
    """
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    tower = "vision_tower."
    named = {name.replace(tower, f"{tower}vision_model."): one for name, one in weights.items()}
    save_file(named, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
