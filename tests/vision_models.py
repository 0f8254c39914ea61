"""Tiny random vision models, of real families, saved as the hub has them.

Their shared vocabulary has characters and the special tokens of Qwen; LLaVA's placeholder is
``<image>``. Images become 16 pixels times 2 a token (Qwen3-VL), 14 times 2 (Qwen2.5-VL), or always
16 tokens (LLaVA, 56 x 56 pixels).
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from async_opd.tools.qualify.measurements.vision import gemma

SPECIAL = (
    *("<pad>", "<bos>", "<eos>", "<unk>", "<|im_start|>", "<|im_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|image_pad|>", "<|video_pad|>", "<image>"),
)
LINE, *LINES = gemma.LINES
TOKENS = (*SPECIAL, *map(chr, range(32, 127)), LINE, *gemma.OF_IMAGES, *LINES)
SIZE = 128
"""Rows of the embeddings."""
EOS = TOKENS.index("<|im_end|>")
PARTS_THAT_SEE = ("visual", "vision_tower", "projector")
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A chat template in the form of Qwen's, with IMAGE where a family's placeholder stands."""
TEXT: dict[str, Any] = {
    "vocab_size": SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 512,
    "bos_token_id": TOKENS.index("<bos>"),
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
QWEN_TOKENS = {
    f"{name}_token_id": TOKENS.index(f"<|{text}|>")
    for name, text in {
        "image": "image_pad",
        "video": "video_pad",
        "vision_start": "vision_start",
        "vision_end": "vision_end",
    }.items()
}


def tokenizer(template: str, **named: str) -> Any:
    """A tokenizer of single characters. ``named``: special tokens by the names of attributes."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(
        models.BPE({t: i for i, t in enumerate(TOKENS)}, gemma.MERGES, unk_token="<unk>")
    )
    core.decoder = decoders.Fuse()
    special = (*SPECIAL, *gemma.OF_IMAGES)
    core.add_special_tokens([AddedToken(one, special=True, normalized=False) for one in special])
    made = PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
        clean_up_tokenization_spaces=False,
        **({"extra_special_tokens": named} if named else {}),
    )
    made.chat_template = template
    return made


def _qwen_processor(kind: str, patch: int) -> Any:
    import transformers

    template = TURNS.replace("IMAGE", "<|vision_start|><|image_pad|><|vision_end|>")
    sizes = {"patch_size": patch, "size": {"shortest_edge": 784, "longest_edge": 28 * 28 * 64}}
    videos = "Qwen3VLVideoProcessor" if kind == "Qwen3VL" else "Qwen2VLVideoProcessor"
    return getattr(transformers, f"{kind}Processor")(
        image_processor=transformers.Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer(template),
        video_processor=getattr(transformers, videos)(patch_size=patch),
        chat_template=template,
    )


def qwen2_5_vl(folder: Path, seed: int = 0) -> Path:
    """A Qwen2.5-VL of two layers, with window attention in the first layer of its tower."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "fullatt_block_indexes": [1],
        "window_size": 56,
    }
    config = Qwen2_5_VLConfig(
        text_config={**TEXT, "rope_parameters": rope}, vision_config=vision, **QWEN_TOKENS
    )
    processor = _qwen_processor("Qwen2_5_VL", 14)
    return _saved(Qwen2_5_VLForConditionalGeneration, config, processor, folder, seed)


def qwen3_vl(folder: Path, seed: int = 0) -> Path:
    """A Qwen3-VL of two layers, with deepstack features of the first layer of its tower."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [6, 5, 5],
        "mrope_interleaved": True,
    }
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 16,
        "num_position_embeddings": 64,
        "deepstack_visual_indexes": [0],
    }
    config = Qwen3VLConfig(
        text_config={**TEXT, "head_dim": 32, "rope_parameters": rope},
        vision_config=vision,
        tie_word_embeddings=True,
        **QWEN_TOKENS,
    )
    processor = _qwen_processor("Qwen3VL", 16)
    return _saved(Qwen3VLForConditionalGeneration, config, processor, folder, seed)


def llava(folder: Path, seed: int = 0) -> Path:
    """A LLaVA 1.5 of two layers: CLIP's tower before Llama."""
    import transformers

    vision = transformers.CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        image_size=56,
        patch_size=14,
        projection_dim=32,
    )
    config = transformers.LlavaConfig(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**TEXT, head_dim=32),
        image_token_index=TOKENS.index("<image>"),
        image_seq_length=16,
    )
    template = TURNS.replace("IMAGE", "<image>")
    processor = transformers.LlavaProcessor(
        image_processor=transformers.CLIPImageProcessor(
            size={"shortest_edge": 56}, crop_size={"height": 56, "width": 56}
        ),
        tokenizer=tokenizer(template),
        patch_size=14,
        vision_feature_select_strategy="default",
        chat_template=template,
        num_additional_image_tokens=1,
    )
    _saved(transformers.LlavaForConditionalGeneration, config, processor, folder, seed)
    return gemma.as_on_the_hub(folder)


def gemma3(folder: Path) -> Path:
    """A Gemma 3 of two layers: SigLIP's tower, 16 tokens an image, which attend to each other."""
    return gemma.saved(folder, tokenizer(TURNS.replace("IMAGE", gemma.BEGIN), **gemma.NAMES))


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen2_5_vl": qwen2_5_vl,
    "qwen3_vl": qwen3_vl,
    "llava": llava,
}
"""Those that are taken on a CPU too."""


def _saved(kind: Any, config: Any, processor: Any, folder: Path, seed: int) -> Path:
    """A random model of this class in float32, with its processor, in ``folder``."""
    import torch
    from transformers import GenerationConfig

    torch.manual_seed(seed)
    model = kind(config).float().eval()
    with torch.no_grad():  # Qwen's towers start with small weights, which would hide images
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and any(part in name for part in PARTS_THAT_SEE):
                weight.copy_(0.2 * torch.randn_like(weight))
    model.generation_config = GenerationConfig(eos_token_id=EOS, pad_token_id=0)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
