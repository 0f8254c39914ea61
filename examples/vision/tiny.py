"""Tiny models for the vision example: Qwen3-VL, Qwen3 for text, one tokenizer."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pictures
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models

SPECIAL = (
    *("<pad>", "<unk>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"),
)
VOCABULARY_SIZE = 128
_USED = (*SPECIAL, *map(chr, range(32, 127)), "\n")
VOCABULARY = (*_USED, *(f"<unused_{i}>" for i in range(VOCABULARY_SIZE - len(_USED))))
ID: Mapping[str, int] = {token: i for i, token in enumerate(VOCABULARY)}
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% endif %}"
)
MAX_LENGTH = 256
PATCH, MERGE = 8, 2
GRID = pictures.SIZE // PATCH
"""Patches in a row and in a column of a picture."""
IMAGE_TOKENS = (GRID // MERGE) ** 2
TEXT: Mapping[str, Any] = {
    "vocab_size": VOCABULARY_SIZE,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": MAX_LENGTH,
    "initializer_range": 0.05,
    "pad_token_id": ID["<pad>"],
    "eos_token_id": ID["<|end|>"],
}
ROPE: Mapping[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [12, 10, 10],
    "mrope_interleaved": True,
}
VISION: Mapping[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": TEXT["hidden_size"],
    "patch_size": PATCH,
    "spatial_merge_size": MERGE,
    "num_position_embeddings": GRID * GRID,
    "deepstack_visual_indexes": [0],
    "initializer_range": 0.05,
}
PIXELS = {"shortest_edge": pictures.SIZE**2, "longest_edge": 4 * pictures.SIZE**2}

Model = Any
"""A model of transformers, which does not annotate the classes that are used here."""
_new_tokenizer: Callable[..., Any] = transformers.PreTrainedTokenizerFast


def make_tokenizer() -> Any:
    """A tokenizer of single characters and special tokens, with a chat template."""
    core = Tokenizer(models.BPE(vocab=dict(ID), merges=[], unk_token="<unk>"))
    core.decoder = decoders.Fuse()
    core.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in SPECIAL])
    made = _new_tokenizer(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<|end|>",
        unk_token="<unk>",
        model_max_length=MAX_LENGTH,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = TEMPLATE
    return made


def make_processor() -> Any:
    """The processor of the vision models: pictures keep their size, and have `IMAGE_TOKENS`."""
    patches = {"patch_size": PATCH, "merge_size": MERGE}
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            **patches, image_mean=[0.5] * 3, image_std=[0.5] * 3, size=PIXELS
        ),
        tokenizer=make_tokenizer(),
        video_processor=transformers.Qwen3VLVideoProcessor(**patches),
        chat_template=TEMPLATE,
    )


def text_model(seed: int) -> Model:
    """An untrained Qwen3 of 0.34 M parameters."""
    torch.manual_seed(seed)
    config = transformers.Qwen3Config(**TEXT, tie_word_embeddings=True)
    return transformers.Qwen3ForCausalLM(config)


def vision_model(seed: int) -> Model:
    """An untrained Qwen3-VL of 0.64 M parameters: the same decoder, and a tower of 0.29 M."""
    torch.manual_seed(seed)
    tokens = {"image": "image_pad", "video": "video_pad"}
    tokens |= {name: name for name in ("vision_start", "vision_end")}
    config = transformers.Qwen3VLConfig(
        text_config={**TEXT, "rope_parameters": dict(ROPE)},
        vision_config=dict(VISION),
        tie_word_embeddings=True,
        **{f"{name}_token_id": ID[f"<|{token}|>"] for name, token in tokens.items()},
    )
    return transformers.Qwen3VLForConditionalGeneration(config)


def save(model: Model, folder: Path) -> None:
    """Write the weights, rounded to bfloat16, with the tokenizer or processor and the configs."""
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=ID["<|end|>"], pad_token_id=ID["<pad>"]
    )
    model.bfloat16().save_pretrained(folder)
    vision = hasattr(model.config, "vision_config")
    (make_processor() if vision else make_tokenizer()).save_pretrained(folder)


def load(folder: Path) -> Model:
    """Saved weights, in float32."""
    vision = (folder / "processor_config.json").exists()
    kind: Any = "Qwen3VLForConditionalGeneration" if vision else "Qwen3ForCausalLM"
    return getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
