"""vLLM engine arguments of student and teacher engines, as plain dictionaries.

This module imports no vllm. The CPU values are measured: see docs/engines.md.
"""

from __future__ import annotations

import math
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Any, Literal

from async_opd.config.device_defaults import ALLOCATOR, ALLOCATOR_KEYS, engine_sizes
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.user_code import ONLY_ENGINES_OFFLINE

Device = Literal["cpu", "cuda"]

CPU_BLOCK_SIZE = 32
MOST = 0.9
"""Largest share of a GPU's memory that ``auto`` gives an engine."""
NVIDIA_SMI_TIMEOUT_S = 20
LOOPBACK = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of a local run's processes: gloo and NCCL listen on the loopback interface."""


def engine_kwargs(
    engine: EngineConfig,
    *,
    model: str,
    device: Device,
    tensor_parallel: int,
    seed: int,
    trust_remote_code: bool,
    sleeps: bool = False,
    images: int = 0,
    processor_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Arguments of ``vllm.AsyncEngineArgs`` for one replica.

    ``engine.extra`` overrides all other arguments, except ``load_format``, ``config_format`` and
    ``trust_remote_code``; its ``hf_overrides`` are added to ours. Requests and outputs are token
    ids: only an engine that takes ``images``, the most of a prompt, loads a tokenizer, for its
    processor, which ``processor_kwargs`` are settings of. ``sleeps``: the engine shares its GPU,
    and can be put to sleep.
    """
    kwargs: dict[str, Any] = {
        "model": model,
        "dtype": engine_dtype(engine, device),
        "tensor_parallel_size": tensor_parallel,
        **engine_sizes(engine, device)._asdict(),
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        "load_format": "safetensors",  # never a pickle
        "config_format": "hf",  # config.json, which was checked, and no params.json beside it
        "skip_tokenizer_init": True,
        "disable_log_stats": True,
        "enable_prefix_caching": True,
        **_device_kwargs(engine, device, sleeps),
    }
    if images:
        kwargs |= _image_kwargs(images, processor_kwargs or {}, device)
    if tensor_parallel > 1:  # in a placement group vLLM would choose Ray, without a GPU left
        kwargs["distributed_executor_backend"] = "mp"
    if engine.max_model_len is not None:
        kwargs["max_model_len"] = engine.max_model_len
    if engine.quantization is not None:
        kwargs["quantization"] = engine.quantization
    if engine.kv_cache_dtype != "auto":
        kwargs["kv_cache_dtype"] = engine.kv_cache_dtype
    given = dict(engine.extra)
    if isinstance(given.get("hf_overrides"), dict):
        given["hf_overrides"] = kwargs.get("hf_overrides", {}) | given["hf_overrides"]
    fixed = {name: kwargs[name] for name in ("load_format", "config_format", "trust_remote_code")}
    return kwargs | given | fixed


def _image_kwargs(images: int, processor: Mapping[str, Any], device: Device) -> dict[str, Any]:
    """The arguments that only engines for prompts with images have.

    vLLM keeps no processed images: its replica renders each prompt once. On a GPU vLLM runs the
    largest images at its start, to see what memory they leave; on a CPU its KV cache has a fixed
    size, and they would take minutes.
    """
    return {
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"image": images, "video": 0, "audio": 0},
        "mm_processor_kwargs": dict(processor),
        "mm_processor_cache_gb": 0,
        "skip_mm_profiling": device == "cpu",
    }


def _device_kwargs(engine: EngineConfig, device: Device, sleeps: bool) -> dict[str, Any]:
    """The arguments that only engines on this device have."""
    if device == "cpu":
        return {
            "enforce_eager": True,
            "kv_cache_memory_bytes": engine.cpu_kv_cache_mib << 20,
            "block_size": CPU_BLOCK_SIZE,
        }
    kwargs: dict[str, Any] = {"enable_sleep_mode": sleeps}
    if engine.gpu_memory_utilization != "auto":
        kwargs["gpu_memory_utilization"] = engine.gpu_memory_utilization
    if engine.head_dtype == "float32":
        kwargs["hf_overrides"] = {"head_dtype": "float32"}
    return kwargs


def engine_dtype(engine: EngineConfig, device: Device) -> str:
    """The dtype of an engine's weights, before they are quantized; see ``EngineConfig.dtype``."""
    dtype = str(engine.extra.get("dtype", engine.dtype))
    if dtype == "auto":
        half = device == "cuda" or engine.quantization is not None
        return "bfloat16" if half else "float32"
    return dtype


def share_left(total: int, beside: int) -> float:
    """The largest share of a GPU of ``total`` bytes that leaves ``beside`` bytes; at most 0.9.

    In whole per cent, rounded down; 0 if nothing is left.
    """
    return min(MOST, max(0, 100 * (total - beside) // total) / 100)


def smallest_gpu() -> int | None:
    """Bytes of this machine's smallest GPU that processes can have; None if that is not known.

    The total of nvidia-smi and NVML contains the driver's reserve: of an
    H100 of 80 GB about 0.5 GiB. CUDA's total, of which vLLM takes an engine's share, does not.
    """
    pairs = [line.split(", ") for line in _of_each_gpu("memory.total,memory.reserved")]
    known = [
        [int(mib) if mib.isdigit() else 0 for mib in pair] for pair in pairs if pair[0].isdigit()
    ]
    return min((total - sum(reserved) << 20 for total, *reserved in known), default=None)


def lowest_capability() -> int | None:
    """The lowest compute capability of this machine's GPUs, times 10; None if it is not known."""
    found = [line.replace(".", "") for line in _of_each_gpu("compute_cap")]
    return min((int(one) for one in found if one.isdigit()), default=None)


def _of_each_gpu(fields: str) -> list[str]:
    """A line of nvidia-smi for each GPU; none if it does not answer."""
    query = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(query, capture_output=True, text=True, timeout=NVIDIA_SMI_TIMEOUT_S)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return listed.stdout.splitlines()


def fitted(kwargs: dict[str, Any], beside: int | None, total: Callable[[], int]) -> dict[str, Any]:
    """The arguments with the engine's share of its GPU of ``total()`` bytes.

    ``beside``: see checks.gpu_memory.beside; None on a CPU. A share that is configured is kept.
    ValueError if others leave nothing.
    """
    if beside is None or "gpu_memory_utilization" in kwargs:
        return kwargs
    share = share_left(total(), beside)
    if not share:
        needed, has = (f"{nbytes / 2**30:.1f}" for nbytes in (beside, total()))
        raise ValueError(f"others keep {needed} GiB of the engine's GPU, which has {has}")
    return {**kwargs, "gpu_memory_utilization": share}


def sleep_level(kwargs: dict[str, Any]) -> int:
    """vLLM's sleep level: 1 frees a GPU's memory; 0 only stops scheduling, as on a CPU."""
    return 1 if kwargs.get("enable_sleep_mode") else 0


WAITS = "OMP_WAIT_POLICY"
"""How OpenMP's threads wait for one another. By default they spin, and on cores that they share
with engines take these from the thread that they wait for: beside one busy process two threads took
7 to 10 times as long as one, and with ``passive`` as long (5 steps of tests/prose.py: 34, 4.5 and
4.7 s)."""


def trainer_env(device: Device, threads: int | Literal["auto"]) -> dict[str, str]:
    """Environment of a trainer's rank, on any node.

    Settings of the allocator in this process's environment replace ours. A rank with ``auto``
    threads starts with one, and sets their number when it knows its student.
    """
    threads = 1 if threads == "auto" else threads
    given = {key: os.environ[key] for key in ALLOCATOR_KEYS if key in os.environ}
    waits = {} if device == "cuda" else {WAITS: os.environ.get(WAITS, "passive")}
    return {"OMP_NUM_THREADS": str(threads), **waits, **(given or ALLOCATOR[device])}


EXECUTE_MODEL_S = 300.0
"""Seconds that vLLM waits by default for one step of the workers of an engine."""


def engine_env(
    device: Device, start_s: float = 600, request_s: float = 600, trusted: bool = False
) -> dict[str, str]:
    """Environment of an engine's process, to be set before vllm is imported.

    All files of its model are on this machine: unless its code is ``trusted``, the libraries ask no
    hub for a further model that the files may name.

    vLLM waits for its own processes no shorter than the run's bounds: ``start_s`` for their start,
    ``request_s`` for one step of several workers, which vLLM itself would give 300 s.
    """
    env = {
        "VLLM_ENGINE_READY_TIMEOUT_S": str(math.ceil(start_s)),
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(math.ceil(max(request_s, EXECUTE_MODEL_S))),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not trusted and "HF_HUB_OFFLINE" not in os.environ:
        env |= {"HF_HUB_OFFLINE": "1", ONLY_ENGINES_OFFLINE: "1"}
    if device == "cpu":
        env |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # of its workers, if it has several
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
        }
    return env
