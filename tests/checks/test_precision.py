"""A device without the kernels of an engine's precision is refused before the engine starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from async_opd.checks.models import ModelChecks
from async_opd.checks.precision import check_precision
from async_opd.checks.preflight import preflight
from async_opd.config.precision import SCHEMES
from async_opd.core.errors import Findings, Problem
from async_opd.models.engine_args import Device
from tests.checks.inputs import config, found, model, one


def problems(override: str, device: Device, capability: int | None = None) -> list[Problem]:
    """Problems of the check of precision alone; the config names no model that was read."""
    findings = Findings("c.yaml")
    checks = ModelChecks(config(override), findings)
    check_precision(checks, device, findings, lambda: capability)
    return findings.problems


@pytest.mark.parametrize("section", ["rollout", "teachers.sort"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_cpu_has_kernels_for_one_scheme(section: str, scheme: str) -> None:
    faults = problems(f"{section}.engine.quantization={scheme}", "cpu")
    assert [fault.key for fault in faults] == (
        [] if scheme == "fp8_per_channel" else [f"{section}.engine.quantization"]
    )


def test_the_remedy_names_the_schemes_that_the_cpu_has() -> None:
    (fault,) = problems("rollout.engine.quantization=mxfp8", "cpu")
    assert "found mxfp8: vLLM has no kernel for it on a CPU" in str(fault)
    assert fault.remedy == "one of fp8_per_channel, or leave it out"


@pytest.mark.parametrize(
    ("scheme", "capability", "known"),
    [
        ("fp8_per_channel", 80, False),
        ("fp8_per_channel", 89, True),
        ("fp8_per_channel", None, True),
        ("fp8_per_block", 70, False),
        ("fp8_per_block", 75, True),
        ("nvfp4_per_token", 90, False),
        ("nvfp4_per_token", 100, True),
        ("nvfp4_per_token", 120, False),
    ],
)
def test_a_gpu_has_kernels_by_its_compute_capability(
    scheme: str, capability: int | None, known: bool
) -> None:
    faults = problems(f"rollout.engine.quantization={scheme}", "cuda", capability)
    assert [fault.key for fault in faults] == ([] if known else ["rollout.engine.quantization"])


def test_the_capability_that_was_found_is_named() -> None:
    (fault,) = problems("rollout.engine.quantization=fp8_per_channel", "cuda", 80)
    assert "GPUs of compute capability 8.0" in fault.message
    assert "fp8_per_block" in fault.remedy


def test_a_cache_of_bfloat16_is_refused_on_a_cpu() -> None:
    (fault,) = problems("teachers.sort.engine.kv_cache_dtype=bfloat16", "cpu")
    assert fault.key == "teachers.sort.engine.kv_cache_dtype"
    assert fault.remedy == "one of auto, fp8, fp8_e4m3, fp8_e5m2"


def test_a_scheme_of_experts_is_refused_for_a_model_without_experts() -> None:
    override = "teachers.sort.engine.quantization=int8_per_channel_weight_only"
    fault = one(override)
    assert "quantizes experts only: this model has none" in fault.message


def test_a_model_whose_files_are_quantized_is_not_quantized_again(tmp_path: Path) -> None:
    path = model(tmp_path, "teacher-sort", quantization_config={"quant_method": "fp8"})
    fault = one(f"teachers.sort.model={path}", "teachers.sort.engine.quantization=fp8_per_channel")
    assert fault.key == "teachers.sort.engine.quantization"
    assert "the model's own files are quantized" in fault.message


def test_a_quantized_teacher_is_taken() -> None:
    assert found("teachers.sort.engine.quantization=fp8_per_channel") == []


FLOAT8 = "rollout.engine.quantization=fp8_per_channel"


FAKE = "sync.fake_quantization=int4_group32"
OTHER = "rollout.engine.quantization=mxfp8"


@pytest.mark.parametrize("override", [FLOAT8, FAKE])
def test_engines_are_proved_whose_scheme_the_trainer_knows(override: str) -> None:
    assert found(override) == []


UNPROVED = [
    (OTHER, (), "by rollout.engine.quantization: fp8_per_channel only"),
    (FLOAT8, ("train.lora={rank: 4, sync: adapter}",), "engines quantize are not sent"),
    (FAKE, ("train.lora={rank: 4}",), "held rows with adapters and rounded matrices"),
    (FLOAT8, ("rollout.tensor_parallel=2",), "divide the matrices that are compared"),
]


@pytest.mark.parametrize(("override", "others", "reason"), UNPROVED)
def test_engines_of_low_precision_that_cannot_be_proved_are_refused_with_the_reason(
    override: str, others: tuple[str, ...], reason: str
) -> None:
    problems = [p for p in found(override, *others) if p.key == override.partition("=")[0]]
    (problem,) = (one for one in problems if reason in one.message)
    assert problem.remedy.startswith("set sync.verify_every: 0")


def test_float8_engines_of_a_vlm_student_are_refused_with_the_reason(tmp_path: Path) -> None:
    student = f"student.model={model(tmp_path, 'student', vision_config={'hidden_size': 8})}"
    messages = [p.message for p in found(FLOAT8, student) if p.key == FLOAT8.partition("=")[0]]
    assert any("engines of a VLM student join matrices" in message for message in messages)


def test_no_adapter_is_rounded() -> None:
    override = "sync.fake_quantization=int4_group32"
    lora = "train.lora={rank: 4, sync: adapter}"
    keys = [problem.key for problem in found(override, "sync.verify_every=0", lora)]
    assert keys == ["sync.fake_quantization"]


@pytest.mark.parametrize(("threshold", "notes"), [(0.5, 1), (0.2, 0)])
def test_a_note_says_when_a_mismatch_cannot_be_measured(threshold: float, notes: int) -> None:
    given = (f"async.staleness_threshold={threshold}", "sync.fake_quantization=int4_group32")
    inputs = preflight(config("sync.verify_every=0", *given), "c.yaml", 0)
    assert sum("mismatch/*" in note for note in inputs.notes) == notes


def test_the_lowest_capability_of_the_gpus_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = SimpleNamespace(stdout="9.0\n8.0\n")

    def nvidia_smi(*_: Any, **__: Any) -> Any:
        return answer

    monkeypatch.setattr("async_opd.models.engine_args.subprocess.run", nvidia_smi)
    settings = config("rollout.engine.quantization=fp8_per_channel", "cluster.device=cuda")
    keys = [one.key for one in preflight(settings, "c.yaml", 8).problems]
    assert "rollout.engine.quantization" in keys
