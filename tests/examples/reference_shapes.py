"""Directories of the reference setting's models: config and tokenizer of real shapes, no weights.

    python -m tests.examples.reference_shapes DIR

Files of weights have the real headers, and holes in place of the numbers: they take no room on
disk, and ``check`` reads what it reads of downloaded ones.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

VOCABULARY, TOKENS, WORDS = 151_936, 151_669, 151_643
"""Rows of the embeddings; tokens of the tokenizer; those of them that are not added tokens."""
IM_END, END_OF_TEXT = 151_645, 151_643
ADDED = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>", "<tool_call>"),
    *("</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>"),
    *("<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>", "<think>"),
    "</think>",
)
SPECIAL = 14
"""The first of them are special; tags of tools and thoughts are text."""
DECODERS: dict[str, dict[str, int]] = {
    "2b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "heads": 16},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "heads": 32},
}
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}{% if part.type == 'image' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MODELS = {
    "Qwen3-VL-2B-Instruct": ("2b", True),
    "Qwen3-4B-Instruct-2507": ("4b", False),
    "Qwen3-VL-4B-Instruct": ("4b", True),
}
"""Decoder of each model, and whether it is a VLM."""


def write_models(folder: Path) -> dict[str, Path]:
    """Writes all models below ``folder``; their directories by name."""
    made = {name: folder / name for name in MODELS}
    tokenizer = _tokenizer()
    for name, (decoder, vision) in MODELS.items():
        made[name].mkdir(parents=True)
        model = _model(decoder, vision)
        model.config.save_pretrained(made[name])
        _write_holes(made[name] / "model.safetensors", model)
        ends = {"eos_token_id": [IM_END, END_OF_TEXT], "pad_token_id": END_OF_TEXT}
        settings: dict[str, Any] = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
        settings |= {"pad_token": "<|endoftext|>", "tokenizer_class": "Qwen2Tokenizer"}
        (made[name] / "generation_config.json").write_text(json.dumps(ends))
        (made[name] / "tokenizer_config.json").write_text(json.dumps(settings))
        (made[name] / "tokenizer.json").write_text(tokenizer)
        if vision:
            (made[name] / "preprocessor_config.json").write_text(json.dumps(_pixels()))
    return made


def _model(decoder: str, vision: bool) -> Any:
    """The model without memory for its weights."""
    import torch
    import transformers

    sizes = dict(DECODERS[decoder])
    text = {
        "vocab_size": VOCABULARY,
        "num_attention_heads": sizes.pop("heads"),
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 262_144,
        "eos_token_id": IM_END,
        **sizes,
    }
    with torch.device("meta"):
        if not vision:
            config = transformers.Qwen3Config(**text, tie_word_embeddings=True, dtype="bfloat16")
            return transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
        rope = {"mrope_section": [24, 20, 20], "mrope_interleaved": True}
        rope |= {"rope_type": "default", "rope_theta": 5e6}
        tower = {
            "depth": 24,
            "hidden_size": 1024,
            "intermediate_size": 4096,
            "num_heads": 16,
            "out_hidden_size": sizes["hidden_size"],
            "deepstack_visual_indexes": [5, 11, 17],
        }
        config = transformers.Qwen3VLConfig(
            text_config={**text, "rope_parameters": rope},
            vision_config=tower,
            tie_word_embeddings=True,
            dtype="bfloat16",
        )
        return transformers.Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)


def _write_holes(path: Path, model: Any) -> None:
    """A safetensors file of the model's own names, shapes and types, with zeros that are holes."""
    header: dict[str, Any] = {}
    end = 0
    tied = set(model._tied_weights_keys or ())
    for name, weight in model.state_dict().items():
        if name in tied:
            continue
        start, end = end, end + 2 * weight.numel()
        header[name] = {"dtype": "BF16", "shape": list(weight.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with path.open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)


def _tokenizer() -> str:
    """A byte-level tokenizer of as many tokens as Qwen's, of which texts use single bytes only."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = letters + [f"<|word {number}|>" for number in range(WORDS - len(letters))]
    core = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    for number, text in enumerate(ADDED):
        special = number < SPECIAL
        token = AddedToken(text, special=special, normalized=False)
        (core.add_special_tokens if special else core.add_tokens)([token])
    assert core.get_vocab_size() == TOKENS
    return core.to_str()


def _pixels() -> dict[str, Any]:
    """The image processor's settings: patches of 16 pixels, merged by 2."""
    return {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen3VLProcessor",
        "patch_size": 16,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }


if __name__ == "__main__":
    for directory in write_models(Path(sys.argv[1])).values():
        print(directory)
