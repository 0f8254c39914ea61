"""Tiny random students of the families that differ from the usual one, made from their configs."""

from __future__ import annotations

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


def made(name: str, **settings: Any) -> Any:
    """A causal language model of the family, in float32, in eval mode. ``settings``: its config."""
    import transformers

    torch.set_num_threads(1)
    torch.manual_seed(0)
    kind = f"{name}Text" if name in ("Llama4", "Gemma3", "Gemma4") else name
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **settings})
    return getattr(transformers, f"{name}ForCausalLM")(config).eval()


def seed_oss() -> Any:
    """Dropout on the residual stream, by a function, at the rates of its config."""
    return made("SeedOss", head_dim=16, attention_dropout=0.2, residual_dropout=0.2)


def gpt_bigcode() -> Any:
    """Dropout of its attention in an attribute called attn_dropout."""
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "n_positions": 64, "n_embd": 32, "n_layer": 2, "n_head": 2}
    config = transformers.GPTBigCodeConfig(
        **sizes,
        attn_pdrop=0.3,
        resid_pdrop=0.2,
        embd_pdrop=0.2,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPTBigCodeForCausalLM(config).eval()


def mixtral() -> Any:
    """Noise on its router's input."""
    return made("Mixtral", num_local_experts=4, router_jitter_noise=0.3)


def phimoe(**settings: Any) -> Any:
    """Samples the expert of a token while it is in training mode."""
    return made("Phimoe", num_local_experts=4, router_jitter_noise=0.3, **settings)


def gemma2(cap: float | None = 2.0, attention_cap: float | None = 1.0) -> Any:
    """Soft caps on its logits and inside of its attention."""
    return made(
        "Gemma2",
        head_dim=16,
        query_pre_attn_scalar=1,
        final_logit_softcapping=cap,
        attn_logit_softcapping=attention_cap,
    )


def granite() -> Any:
    """Divides its logits."""
    return made("Granite", logits_scaling=4.0)


def cohere() -> Any:
    """Multiplies its logits."""
    return made("Cohere", logit_scale=0.25)


def phi3() -> Any:
    """LongRoPE: other frequencies beyond 32 positions."""
    return made(
        "Phi3",
        num_key_value_heads=2,
        max_position_embeddings=128,
        original_max_position_embeddings=32,
        rope_parameters=dict(LONGROPE),
    )


def dynamic_ntk() -> Any:
    """Other frequencies for every length beyond 32 positions."""
    rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
    return made("Llama", max_position_embeddings=32, rope_parameters=rope)


def llama4() -> Any:
    """Chunked attention, and a temperature by the place in the row."""
    return made(
        "Llama4",
        head_dim=16,
        intermediate_size_mlp=48,
        num_local_experts=2,
        attention_chunk_size=8,
        num_hidden_layers=4,
    )


def mistral(window: int) -> Any:
    """Sliding windows in all layers."""
    return made("Mistral", head_dim=16, sliding_window=window)


def gemma3() -> Any:
    """A sliding window in the first of two layers."""
    kinds = ["sliding_attention", "full_attention"]
    return made("Gemma3", head_dim=16, sliding_window=3, layer_types=kinds)


def gemma4(**settings: Any) -> Any:
    """Wider heads in layers without a window, keys of other layers, and inputs of each layer."""
    return made(
        "Gemma4",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        head_dim=16,
        global_head_dim=32,
        sliding_window=3,
        vocab_size_per_layer_input=32,
        hidden_size_per_layer_input=8,
        **{"num_kv_shared_layers": 2, **settings},
    )


def gpt_oss() -> Any:
    """Sinks, which take a share of every query's attention."""
    kinds = ["sliding_attention", "full_attention"]
    settings = {"sliding_window": 3, "layer_types": kinds, "num_experts_per_tok": 2}
    return made("GptOss", head_dim=16, num_local_experts=2, **settings)


def deepseek() -> Any:
    """Latent attention: values are narrower than queries."""
    return made(
        "DeepseekV3",
        num_key_value_heads=2,
        kv_lora_rank=16,
        q_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=16,
        v_head_dim=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        moe_intermediate_size=16,
        first_k_dense_replace=1,
    )


def bloom() -> Any:
    """ALiBi: scores fall with the distance, by a bias that its own attention adds."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BloomConfig(vocab_size=32, hidden_size=32, n_layer=2, n_head=2)
    return transformers.BloomForCausalLM(config).eval()


def mamba() -> Any:
    """No attention: a state that every token passes on."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MambaConfig(vocab_size=32, hidden_size=32, num_hidden_layers=2)
    return transformers.MambaForCausalLM(config).eval()


def qwen3_next() -> Any:
    """Linear attention in the first of two layers."""
    kinds = ["linear_attention", "full_attention"]
    return made("Qwen3Next", head_dim=16, layer_types=kinds, num_experts=2, num_experts_per_tok=1)
