"""The arguments of vLLM's engines: the precision of their logits, what they take beside text."""

from __future__ import annotations

from typing import Any

import pytest

from async_opd.config.sections.engine import EngineConfig
from async_opd.models.engine_args import (
    Device,
    engine_dtype,
    engine_env,
    engine_kwargs,
    fitted,
    share_left,
)


def arguments(device: Device, engine: EngineConfig | None = None, **images: Any) -> dict[str, Any]:
    """The arguments of one replica. ``images``: those about images."""
    return engine_kwargs(
        engine or EngineConfig(),
        model="m",
        device=device,
        tensor_parallel=1,
        seed=0,
        trust_remote_code=False,
        **images,
    )


def overrides(device: Device, **settings: Any) -> Any:
    """The engine's hf_overrides; None without."""
    return arguments(device, EngineConfig(**settings)).get("hf_overrides")


@pytest.mark.parametrize(
    ("settings", "device", "expected"),
    [
        ({}, "cpu", "float32"),
        ({}, "cuda", "bfloat16"),
        ({"dtype": "float16"}, "cuda", "float16"),
        ({"dtype": "float16", "extra": {"dtype": "float32"}}, "cuda", "float32"),
        ({"quantization": "fp8_per_channel"}, "cpu", "bfloat16"),
    ],
)
def test_the_dtype_of_an_engines_weights(
    settings: dict[str, Any], device: Device, expected: str
) -> None:
    engine = EngineConfig(**settings)
    arguments = engine_kwargs(
        engine, model="m", device=device, tensor_parallel=1, seed=0, trust_remote_code=False
    )
    assert engine_dtype(engine, device) == arguments["dtype"] == expected


def test_the_keys_of_precision_are_vllms() -> None:
    given = EngineConfig(quantization="fp8_per_channel", kv_cache_dtype="fp8")
    found = arguments("cpu", given)
    assert (found["quantization"], found["kv_cache_dtype"]) == ("fp8_per_channel", "fp8")
    assert {"quantization", "kv_cache_dtype"}.isdisjoint(arguments("cpu"))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"quantization": "mxfp8", "dtype": "float32"}, "bfloat16 and float16 only"),
        ({"quantization": "mxfp8", "extra": {"dtype": "float32"}}, "bfloat16 and float16 only"),
        (
            {"quantization": "mxfp8", "extra": {"quantization": "fp8"}},
            "'quantization' is set twice",
        ),
        ({"kv_cache_dtype": "fp8", "extra": {"kv_cache_dtype": "fp8"}}, "is set twice"),
    ],
)
def test_keys_of_precision_that_contradict_are_refused(
    settings: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        EngineConfig(**settings)


def test_logits_of_a_gpus_engine_are_float32() -> None:
    assert overrides("cuda") == {"head_dtype": "float32"}


def test_an_engine_on_a_cpu_keeps_its_models_head() -> None:
    assert overrides("cpu") is None


def test_a_head_in_the_models_dtype_is_left_alone() -> None:
    assert overrides("cuda", head_dtype="model") is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_overrides_of_the_user_are_added_and_win(device: Device) -> None:
    given = {"hf_overrides": {"head_dtype": "bfloat16", "architectures": ["A"]}}
    assert overrides(device, extra=given) == given["hf_overrides"]
    ours = {"head_dtype": "float32"} if device == "cuda" else {}
    given = {"hf_overrides": {"architectures": ["A"]}}
    assert overrides(device, extra=given) == ours | given["hf_overrides"]


@pytest.mark.parametrize(("tensor_parallel", "expected"), [(1, None), (2, "mp")])
def test_an_engine_of_several_gpus_starts_its_own_worker_processes(
    tensor_parallel: int, expected: str | None
) -> None:
    found = engine_kwargs(
        EngineConfig(),
        model="m",
        device="cuda",
        tensor_parallel=tensor_parallel,
        seed=0,
        trust_remote_code=False,
    )
    assert found.get("distributed_executor_backend") == expected


GIB = 1 << 30


@pytest.mark.parametrize(
    ("total", "beside", "share"), [(80, 1, 0.9), (80, 20, 0.75), (24, 3, 0.87), (8, 9, 0.0)]
)
def test_a_share_leaves_what_others_need(total: int, beside: int, share: float) -> None:
    assert share_left(total * GIB, beside * GIB) == share


def on_gpu(**settings: Any) -> dict[str, Any]:
    return engine_kwargs(
        EngineConfig(**settings),
        model="m",
        device="cuda",
        tensor_parallel=1,
        seed=0,
        trust_remote_code=False,
    )


def test_an_engine_takes_what_others_leave_of_its_own_gpu() -> None:
    assert fitted(on_gpu(), 20 * GIB, lambda: 80 * GIB)["gpu_memory_utilization"] == 0.75


@pytest.mark.parametrize(
    "settings",
    [{"gpu_memory_utilization": 0.3}, {"extra": {"gpu_memory_utilization": 0.3}}],
)
def test_a_configured_share_is_kept(settings: dict[str, Any]) -> None:
    found = fitted(on_gpu(**settings), 20 * GIB, lambda: 80 * GIB)
    assert found["gpu_memory_utilization"] == 0.3


def test_an_engine_on_a_cpu_has_no_share_of_a_gpu() -> None:
    assert "gpu_memory_utilization" not in fitted({}, None, lambda: 0)


def test_a_gpu_of_which_others_leave_nothing_is_named() -> None:
    with pytest.raises(ValueError, match=r"others keep 90\.0 GiB .* which has 80\.0"):
        fitted(on_gpu(), 90 * GIB, lambda: 80 * GIB)


def test_an_engine_may_take_as_long_to_start_as_the_run_allows() -> None:
    """vLLM would end the wait after 600 s, whatever ``timeouts.engine_start_s`` says."""
    assert engine_env("cuda", 1800.5)["VLLM_ENGINE_READY_TIMEOUT_S"] == "1801"


@pytest.mark.parametrize(("request_s", "waits"), [(600.5, "601"), (60, "300")])
def test_vllm_waits_for_a_step_as_long_as_a_request_may_last(request_s: float, waits: str) -> None:
    found = engine_env("cuda", request_s=request_s)["VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"]
    assert found == waits


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_of_text_loads_no_tokenizer_and_no_processor(device: Device) -> None:
    found = arguments(device)
    assert found["skip_tokenizer_init"]
    assert not [name for name in found if "mm_" in name]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_engine_for_images_takes_so_many_in_a_prompt_with_the_models_settings(
    device: Device,
) -> None:
    found = arguments(device, images=3, processor_kwargs={"max_pixels": 784})
    assert not found["skip_tokenizer_init"]
    assert found["limit_mm_per_prompt"] == {"image": 3, "video": 0, "audio": 0}
    assert found["mm_processor_kwargs"] == {"max_pixels": 784}
    assert found["skip_mm_profiling"] == (device == "cpu")


def test_the_users_own_arguments_about_images_win() -> None:
    found = arguments("cpu", EngineConfig(extra={"mm_processor_cache_gb": 1}), images=3)
    assert found["mm_processor_cache_gb"] == 1
