"""A Qwen3-style model with random weights, for measuring engines: its texts mean nothing."""

from __future__ import annotations

from pathlib import Path


def make_model(
    path: Path, *, vocabulary: int, layers: int = 8, hidden: int = 256, half: bool = False
) -> Path:
    """Writes it; positions up to 4096, float32 or ``half`` bfloat16, an untied head."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=max(1, hidden // 64),
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        initializer_range=0.1,
    )
    dtype = torch.bfloat16 if half else torch.float32
    Qwen3ForCausalLM(config).to(dtype).save_pretrained(path)
    return path
