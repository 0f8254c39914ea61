"""The ``engine`` sections: one vLLM engine of the student or of a teacher."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from async_opd.core.section import Section


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
    """Further arguments of ``vllm.AsyncEngineArgs``, passed on as they are."""

    @field_validator("extra")
    @classmethod
    def _asked_for_where_it_is_seen(cls, value: dict[str, Any]) -> dict[str, Any]:
        if "trust_remote_code" in value:
            raise ValueError(
                "no trust_remote_code here: it is a key of the student's or the teacher's section"
            )
        return value
