"""The ``engine`` sections: one vLLM engine of the student or of a teacher."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from async_opd.config.section import Section


class EngineConfig(Section):
    """One vLLM engine. Every replica of a pool gets the same."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Weights and activations; ``auto`` is bfloat16 on a GPU and float32 on a CPU."""
    max_model_len: PositiveInt | None = None
    """Longest prompt plus response in tokens; by default the model's own limit."""
    max_num_seqs: PositiveInt = 64
    """Requests an engine works on at the same time; more wait outside of it."""
    max_num_batched_tokens: PositiveInt | None = None
    """Tokens per engine step; bounds the memory of prompt log-probabilities too."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of a GPU's memory the engine may take."""
    cpu_kv_cache_mib: PositiveInt = 64
    """KV cache of an engine on CPU, in MiB."""
    extra: dict[str, Any] = Field(default={})
    """Further arguments of ``vllm.AsyncEngineArgs``, passed on as they are. Which model it is, how
    its weights are read and whether its code runs cannot be said here."""

    @field_validator("extra")
    @classmethod
    def _asked_for_where_it_is_seen(cls, value: dict[str, Any]) -> dict[str, Any]:
        if _asks_for(value, "trust_remote_code"):
            raise ValueError(
                "no trust_remote_code here: it is a key of the student's or the teacher's section"
            )
        if _asks_for(value, "load_format"):
            raise ValueError("no load_format here: weights are read from safetensors only")
        owned = sorted(OWNED & {_plain(name) for name in value})
        if owned:
            raise ValueError(f"no {owned[0]} here: the model is named in its own section")
        return value


OWNED = {"model", "revision", "code_revision", "hf_config_path"}
"""Arguments of vLLM that would put other files in the place of those that were checked."""


def _asks_for(value: Any, name: str) -> bool:
    """Whether it is a key, or in a text that may be parsed, at any depth."""
    if isinstance(value, dict):
        return any(_asks_for(one, name) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return any(_asks_for(one, name) for one in value)
    return isinstance(value, str) and name in _plain(value)


def _plain(name: str) -> str:
    return str(name).replace("-", "_").lower()
