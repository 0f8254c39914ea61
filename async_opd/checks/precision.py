"""Checks that the device has the kernels of the engines' precision, before vLLM looks for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from async_opd.checks.models import ModelChecks
from async_opd.config.precision import CACHES_ON_CPU, SCHEMES, Quantization
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.engine import EngineConfig
from async_opd.config.sections.loss import cuts
from async_opd.core.errors import Findings
from async_opd.models.engine_args import Device, lowest_capability
from async_opd.models.model_files import ModelFiles
from async_opd.models.model_size import ModelSize


def check_precision(
    models: ModelChecks,
    device: Device,
    found: Findings,
    lowest: Callable[[], int | None] = lowest_capability,
) -> None:
    """Checks all engines of the run. ``lowest`` is asked for this machine's GPUs."""
    capability = lowest() if device == "cuda" and not models.config.cluster.joins else None
    for section, engine, files in models.engines():
        for key, message, remedy in _faults(engine, files, device, capability):
            found.add(f"{section}.engine.{key}", message, remedy)
    config = models.config
    lora, fake = config.train.lora, config.sync.fake_quantization
    if fake is not None and lora is not None and lora.sync == "adapter":
        message = f"found {fake} with train.lora.sync adapter: no matrix of the student is sent"
        found.add("sync.fake_quantization", message, "set train.lora.sync to merged")
    if note := _unmeasured(config):
        found.notes.append(note)


def _faults(
    engine: EngineConfig, files: ModelFiles | None, device: Device, capability: int | None
) -> Iterator[tuple[str, str, str]]:
    """The keys of a section, what is wrong with them, and remedies."""
    cache, name = engine.kv_cache_dtype, engine.quantization
    if device == "cpu" and cache not in CACHES_ON_CPU:
        message = f"found {cache}: vLLM has no kernel for it on a CPU"
        yield "kv_cache_dtype", message, f"one of {', '.join(sorted(CACHES_ON_CPU))}"
    if name is None:
        return
    scheme, key = SCHEMES[name], "quantization"
    if files is not None and files.quantized:
        message = f"found {name}, but the model's own files are quantized"
        yield key, message, "leave it out, or take the model's files before they were quantized"
    elif scheme.experts and files is not None and not ModelSize.of(files.config, ()).experts:
        message = f"found {name}, which quantizes experts only: this model has none"
        yield key, message, "take fp8_per_channel, or leave it out"
    elif device == "cpu" and files is not None and ModelSize.of(files.config, ()).experts:
        message = f"found {name}: vLLM has no kernel for quantized experts on a CPU"
        yield key, message, "leave it out"
    elif device == "cpu" and not scheme.on_cpu:
        message = f"found {name}: vLLM has no kernel for it on a CPU"
        yield key, message, f"one of {', '.join(_names(None))}, or leave it out"
    elif device == "cuda" and capability is not None and capability not in scheme.capabilities:
        has = f"{capability // 10}.{capability % 10}"
        message = f"found {name}: vLLM has no kernel for it on GPUs of compute capability {has}"
        yield key, message, f"one of {', '.join(_names(capability))}, or leave it out"


def _names(capability: int | None) -> Iterator[Quantization]:
    """The schemes that GPUs of a capability, or a CPU, have kernels for."""
    for name, scheme in SCHEMES.items():
        if scheme.on_cpu if capability is None else capability in scheme.capabilities:
            yield name


def _unmeasured(config: RunConfig) -> str:
    """A note where no step of low precision could have samples of the weights that it trains."""
    rollout = config.rollout
    named = rollout.engine.quantization or rollout.engine.extra.get("quantization")
    quantized = named or config.sync.fake_quantization
    ahead = config.async_.staleness_threshold * config.async_.sync_steps
    if quantized is None:
        return ""
    if excluding := cuts(rollout.top_p, rollout.top_k, rollout.min_p):
        keys = ", ".join(key for key, _, _ in excluding)
        return f"rollout.engine: with {keys} no mismatch/* of {quantized} can be measured"
    if ahead < 1:
        return ""
    return (
        f"rollout.engine: of {quantized} mismatch/* is measured in the run's first step alone: the "
        "first step of each version trains samples of the version before, and later steps have "
        "other weights than the engines; an async.staleness_threshold below "
        f"{1 / config.async_.sync_steps:g} leaves fresh samples to each first step"
    )
