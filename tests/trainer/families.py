"""Tiny random students of the families that differ from the usual one, made from their configs."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0] * 8,
    "long_factor": [4.0 + i for i in range(8)],
    "original_max_position_embeddings": 32,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
WINDOW_FIRST = ["sliding_attention", "full_attention"]
LINEAR_FIRST = ["linear_attention", "full_attention"]
FEW_EXPERTS = {"num_local_experts": 4, "router_jitter_noise": 0.3}


def plain(name: str, kind: str = "", **config: Any) -> Any:
    """A causal language model with this config, in float32, in eval mode."""
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    made = getattr(transformers, f"{kind or name}Config")(**config)
    return getattr(transformers, f"{name}ForCausalLM")(made).eval()


def made(name: str, **settings: Any) -> Any:
    """Of the usual sizes but for ``settings``."""
    text = name in ("Llama4", "Gemma3", "Gemma4")
    return plain(name, f"{name}Text" if text else name, **{**SIZES, **settings})


seed_oss = partial(made, "SeedOss", head_dim=16, attention_dropout=0.2, residual_dropout=0.2)
"""Dropout on the residual stream, by a function, at the rates of its config."""
BIGCODE_SIZES = {"vocab_size": 32, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
BIGCODE_DROPOUT = {
    "attn_pdrop": 0.3,
    "resid_pdrop": 0.2,
    "embd_pdrop": 0.2,
    "initializer_range": 0.3,
}
BIGCODE_IDS = {"bos_token_id": 1, "eos_token_id": 2}
gpt_bigcode = partial(plain, "GPTBigCode", **BIGCODE_SIZES | BIGCODE_DROPOUT | BIGCODE_IDS)
"""Dropout of its attention in an attribute called attn_dropout."""
mixtral = partial(made, "Mixtral", **FEW_EXPERTS)
"""Noise on its router's input."""
phimoe = partial(made, "Phimoe", **FEW_EXPERTS)
"""Samples the expert of a token while it is in training mode."""
granite = partial(made, "Granite", logits_scaling=4.0)
"""Divides its logits."""
cohere = partial(made, "Cohere", logit_scale=0.25)
"""Multiplies its logits."""
gemma3 = partial(made, "Gemma3", head_dim=16, sliding_window=3, layer_types=WINDOW_FIRST)
"""A sliding window in the first of two layers."""
QWEN3_NEXT = {
    "head_dim": 16,
    "layer_types": LINEAR_FIRST,
    "num_experts": 2,
    "num_experts_per_tok": 1,
}
qwen3_next = partial(made, "Qwen3Next", **QWEN3_NEXT)
"""Linear attention in the first of two layers."""
mamba = partial(plain, "Mamba", vocab_size=32, hidden_size=32, num_hidden_layers=2)
"""No attention: a state that every token passes on."""
bloom = partial(plain, "Bloom", vocab_size=32, hidden_size=32, n_layer=2, n_head=2)
"""ALiBi: scores fall with the distance, by a bias that its own attention adds."""
dynamic_ntk = partial(made, "Llama", max_position_embeddings=32, rope_parameters=DYNAMIC)
"""Other frequencies for every length beyond 32 positions."""
OSS_EXPERTS = {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 2}
OSS_WINDOW = {"sliding_window": 3, "layer_types": WINDOW_FIRST}
gpt_oss = partial(made, "GptOss", **OSS_EXPERTS | OSS_WINDOW)
"""Sinks, which take a share of every query's attention."""
LLAMA4_EXPERTS = {"head_dim": 16, "intermediate_size_mlp": 48, "num_local_experts": 2}
LLAMA4_CHUNKS = {"attention_chunk_size": 8, "num_hidden_layers": 4}
llama4 = partial(made, "Llama4", **LLAMA4_EXPERTS | LLAMA4_CHUNKS)
"""Chunked attention, and a temperature by the place in the row."""
GEMMA4_LAYERS = {"num_hidden_layers": 4, "layer_types": WINDOW_FIRST * 2, "head_dim": 16}
GEMMA4_WIDE = {"global_head_dim": 32, "sliding_window": 3, "num_kv_shared_layers": 2}
GEMMA4_INPUTS = {"vocab_size_per_layer_input": 32, "hidden_size_per_layer_input": 8}
gemma4 = partial(made, "Gemma4", **GEMMA4_LAYERS | GEMMA4_WIDE | GEMMA4_INPUTS)
"""Wider heads in layers without a window, keys of other layers, and inputs of each layer."""
LATENT_RANKS = {
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
}
LATENT_HEADS = {
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
}
LATENT_EXPERTS = {
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
deepseek = partial(made, "DeepseekV3", **LATENT_RANKS | LATENT_HEADS | LATENT_EXPERTS)
"""Latent attention: values are narrower than queries."""


def gemma2(cap: float | None = 2.0, attention_cap: float | None = 1.0) -> Any:
    """Soft caps on its logits and inside of its attention."""
    caps = {"final_logit_softcapping": cap, "attn_logit_softcapping": attention_cap}
    return made("Gemma2", head_dim=16, query_pre_attn_scalar=1, **caps)


def phi3() -> Any:
    """LongRoPE: other frequencies beyond 32 positions."""
    sizes = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}
    return made("Phi3", num_key_value_heads=2, rope_parameters=dict(LONGROPE), **sizes)


def mistral(window: int) -> Any:
    """Sliding windows in all layers."""
    return made("Mistral", head_dim=16, sliding_window=window)
