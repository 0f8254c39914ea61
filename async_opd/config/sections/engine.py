"""The ``engine`` sections: one vLLM engine of the student or of a teacher."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from async_opd.config.precision import SCHEMES, CacheDtype, Quantization, Scheme
from async_opd.config.sections.section import Count, Section

SPANS = (
    "a teacher that is larger than a node is of kind: endpoint, since its server may be on several "
    "(docs/cluster.md)"
)


class EngineConfig(Section):
    """Settings of one vLLM engine, the same for every replica of a pool."""

    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of weights and activations; ``auto`` is bfloat16 on a GPU, float32 on a CPU, and
    bfloat16 there with ``quantization``."""
    quantization: Quantization | None = None
    """Quantizes the weights while they are loaded, the student's again at each sync. Which devices
    have the kernels: docs/engines.md. A model whose own files are quantized does not need it."""
    kv_cache_dtype: CacheDtype = "auto"
    """Type of the KV cache's numbers; ``auto`` is that of the activations. float8 holds twice as
    many tokens as bfloat16."""
    head_dtype: Literal["float32", "model"] = "float32"
    """Precision of the logits on a GPU: bfloat16 has steps of 0.125 at logits of 16 to 32, which
    are errors of log-probabilities up to 0.06 nats. A quantized head needs ``model``: the dtype of
    the model."""
    max_model_len: Count | None = None
    """Longest prompt plus response in tokens. By default what the run needs, if
    ``data.max_prompt_tokens`` is set: that, the longest response, and one token; the model's own
    limit without it, for LongRoPE and dynamic NTK, and for a teacher whose prompts or images differ
    from the student's. An engine starts only if its KV cache holds one such sequence."""
    max_num_seqs: Count | Literal["auto"] = "auto"
    """Requests that an engine runs at the same time; further ones wait outside of it. ``auto``: 64
    on a CPU, 256 on GPUs. A call to a teacher has as many rollouts, but at most 64."""
    max_num_batched_tokens: Count | Literal["auto"] = "auto"
    """Tokens per engine step, which the memory of activations grows with. ``auto``: 2048 on a CPU,
    8192 on GPUs, and at least ``max_num_seqs``."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] = "auto"
    """Share of a GPU's memory that the engine may take. ``auto``: what CUDA and all others on the
    same GPU leave, at most 0.9 (docs/engines.md)."""
    cpu_kv_cache_mib: Count = 64
    """KV cache of an engine on CPU, in MiB."""
    extra: dict[str, Any] = Field(default={})
    """Further arguments of ``vllm.AsyncEngineArgs``, passed on unchanged. The model, the format of
    its weights and trust in its code cannot be set here."""

    @model_validator(mode="before")
    @classmethod
    def _is_on_one_node(cls, value: Any) -> Any:
        if isinstance(value, dict) and "pipeline_parallel" in value:
            raise ValueError(f"no 'pipeline_parallel': an engine is on one node; {SPANS}")
        return value

    @field_validator("extra")
    @classmethod
    def _sets_nothing_that_other_keys_set(cls, value: dict[str, Any]) -> dict[str, Any]:
        if _mentions(value, "trust_remote_code"):
            raise ValueError(
                "no trust_remote_code here: it is a key of the student's or the teacher's section"
            )
        if _mentions(value, "load_format"):
            raise ValueError("no load_format here: weights are read from safetensors only")
        if named := sorted({"model", "tokenizer"} & set(_keys(value))):
            raise ValueError(f"no {named[0]} here: engines load what was checked, at any depth")
        names = {_normalized(name) for name in value}
        if owned := sorted(OWNED & names):
            raise ValueError(f"no {owned[0]} here: the model is named in its own section")
        if "mm_processor_kwargs" in names:
            raise ValueError(
                "no mm_processor_kwargs here: the trainer needs them too, by the key "
                "processor_kwargs of the student's or the teacher's section"
            )
        if moved := sorted(PLACED & names):
            raise ValueError(
                f"no {moved[0]} here: it changes the GPUs or the executor of an engine, which the "
                f"run places and plans by its section's tensor_parallel and replicas; {SPANS}"
            )
        if fixed := sorted(FIXED & names):
            raise ValueError(f"no {fixed[0]} here: scores and weight syncs need the run's own")
        return value

    @model_validator(mode="after")
    def _can_be_quantized(self) -> Self:
        if self.quantization is not None and self.extra.get("dtype", self.dtype) == "float32":
            raise ValueError(
                f"'quantization' {self.quantization} with 'dtype' float32: vLLM quantizes weights "
                "of bfloat16 and float16 only; leave dtype out"
            )
        for key in ("quantization", "kv_cache_dtype"):
            if getattr(self, key) not in (None, "auto") and key in self.extra:
                raise ValueError(f"'{key}' is set twice: remove it from extra")
        return self

    @property
    def scheme(self) -> Scheme | None:
        """That of ``quantization``, or ``extra``'s; None: the weights are as in the files."""
        named = self.quantization or self.extra.get("quantization")
        return SCHEMES.get(str(named))  # type: ignore[call-overload, no-any-return]

    @property
    def whole(self) -> Self:
        """The same engine with weights as in the files, and a cache like its activations."""
        rounded = {"quantization", "quantization_config", "compression_config"}
        extra = {key: value for key, value in self.extra.items() if key not in rounded}
        if str(extra.get("kv_cache_dtype")).startswith("fp8"):
            del extra["kv_cache_dtype"]
        overrides = extra.get("hf_overrides")
        if isinstance(overrides, dict):
            extra["hf_overrides"] = {k: v for k, v in overrides.items() if k not in rounded}
        cache = "auto" if self.kv_cache_dtype.startswith("fp8") else self.kv_cache_dtype
        parts = {"quantization": None, "kv_cache_dtype": cache, "extra": extra}
        return self.model_copy(update=parts)

    @property
    def low_precision(self) -> bool:
        """Whether the engine rounds the weights of the files, or its KV cache to float8."""
        return self != self.whole

    def cache_itemsize(self, dtype: str) -> int:
        """Bytes of a number in the KV cache of an engine that computes in ``dtype``."""
        cached = str(self.extra.get("kv_cache_dtype", self.kv_cache_dtype))
        if cached.startswith("fp8"):
            return 1
        return 4 if cached == "auto" and dtype == "float32" else 2


OWNED = {"model", "revision", "code_revision", "hf_config_path", "config_format"}
"""Arguments of vLLM that would load other files than those that were checked."""

FIXED = {
    *("worker_extension_cls", "weight_transfer_config", "logprobs_mode", "max_logprobs"),
    *("enable_lora", "max_loras", "max_lora_rank", "max_cpu_loras"),
    "enable_return_routed_experts",
}
"""Arguments of vLLM that every replica sets itself."""


PLACED = {
    *("tensor_parallel_size", "pipeline_parallel_size", "prefill_context_parallel_size"),
    *("data_parallel_size", "data_parallel_size_local", "data_parallel_rank"),
    *("data_parallel_start_rank", "data_parallel_address", "data_parallel_rpc_port"),
    *("data_parallel_backend", "data_parallel_hybrid_lb", "data_parallel_external_lb"),
    *("distributed_executor_backend", "nnodes", "node_rank", "master_addr", "master_port"),
    *("device_ids", "worker_cls"),
}
"""Arguments of vLLM on which an engine's GPUs and processes depend."""


def _mentions(value: Any, name: str) -> bool:
    """Whether a key or a text has the name, at any depth: vLLM parses JSON in texts too."""
    if isinstance(value, dict):
        return any(_mentions(one, name) for pair in value.items() for one in pair)
    if isinstance(value, list | tuple):
        return any(_mentions(one, name) for one in value)
    if isinstance(value, str) and name not in _normalized(value):
        return any(name in key for key in _keys(_parsed(value)))
    return isinstance(value, str)


def _keys(value: Any) -> Iterator[str]:
    """All keys at any depth, normalized; also of JSON in texts."""
    if isinstance(value, str):
        value = _parsed(value)
    if isinstance(value, dict):
        yield from map(_normalized, value)
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for one in parts:
        yield from _keys(one)


def _parsed(text: str) -> Any:
    """The value that vLLM reads from a text; None if it is not JSON."""
    try:
        return json.loads(text) if text.lstrip().startswith(("{", "[")) else None
    except (ValueError, RecursionError):
        return None


def _normalized(name: str) -> str:
    return str(name).replace("-", "_").lower()
