"""vLLM engine arguments as plain data: one place for what a student and a teacher engine share.

Pure dictionaries, so that core needs no vllm. The CPU values are measured: see docs/engines.md.
"""

from __future__ import annotations

from typing import Any, Literal

from async_opd.config.run_config import EngineConfig

Device = Literal["cpu", "cuda"]

CPU_BLOCK_SIZE = 32
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of the processes of a local run: what gloo and NCCL listen on."""


def engine_kwargs(
    engine: EngineConfig,
    *,
    model: str,
    device: Device,
    tensor_parallel: int,
    seed: int,
    trust_remote_code: bool,
    sleeps: bool = False,
) -> dict[str, Any]:
    """Arguments of ``vllm.AsyncEngineArgs`` for one replica.

    ``engine.extra`` has the last word, but for how weights are read and whether the model's code
    runs.

    No engine loads a tokenizer: token ids come and go. ``sleeps``: it shares its GPU with others.
    """
    kwargs: dict[str, Any] = {
        "model": model,
        "dtype": engine.dtype,
        "tensor_parallel_size": tensor_parallel,
        "max_num_seqs": engine.max_num_seqs,
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        "load_format": "safetensors",  # never a pickle
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
    }
    if engine.max_model_len is not None:
        kwargs["max_model_len"] = engine.max_model_len
    if engine.max_num_batched_tokens is not None:
        kwargs["max_num_batched_tokens"] = engine.max_num_batched_tokens
    if device == "cpu":
        kwargs |= {
            "dtype": "float32" if engine.dtype == "auto" else engine.dtype,
            "enforce_eager": True,
            "kv_cache_memory_bytes": engine.cpu_kv_cache_mib << 20,
            "block_size": CPU_BLOCK_SIZE,
        }
    else:
        kwargs["gpu_memory_utilization"] = engine.gpu_memory_utilization
        kwargs["enable_sleep_mode"] = sleeps
        if engine.dtype == "auto":
            kwargs["dtype"] = "bfloat16"
    said = {name: kwargs[name] for name in ("load_format", "trust_remote_code")}
    return kwargs | engine.extra | said


def sleep_level(kwargs: dict[str, Any]) -> int:
    """vLLM's: 1 frees a GPU's memory, 0 only stops scheduling, all that can be had on a CPU."""
    return 1 if kwargs.get("enable_sleep_mode") else 0


def engine_env(device: Device) -> dict[str, str]:
    """Environment of a process that holds an engine; must be there before vllm is imported."""
    env = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        env |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    return env
