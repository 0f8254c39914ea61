"""vLLM's quantization: its settings import nothing; the table of online schemes is vLLM's own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch

from async_opd.config.precision import CACHES_ON_CPU, NEWEST, SCHEMES
from trainer.student.quantization import GRIDS, rounded


@pytest.mark.slow
def test_the_type_of_a_transform_is_not_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    from compressed_tensors.registry import registry
    from vllm.model_executor.layers.quantization.compressed_tensors import compressed_tensors
    from vllm.model_executor.layers.quantization.compressed_tensors.transform import linear

    def imported(*named: Any) -> None:
        pytest.fail(f"vLLM imports {named}")

    monkeypatch.setattr(registry, "_import_and_get_value_from_module", imported)
    part = {"location": "input", "targets": ["Linear"]}
    scheme = {"type": "/x.py:T", "apply": [part], "head_dim": 8}
    settings: dict[str, Any] = {
        "quant_method": "compressed-tensors",
        "format": "dense",
        "config_groups": {},
        "ignore": [],
        "transform_config": {"config_groups": {"R1": scheme}},
    }
    made = compressed_tensors.CompressedTensorsConfig.from_config(settings)
    layer = torch.nn.Linear(2, 2)
    inputs, _ = linear.get_linear_transform_schemes(layer, "a.q_proj", made.transform_config, {})
    assert inputs[0].scheme.type == "/x.py:T"


@pytest.mark.slow
def test_the_schemes_are_those_that_vllm_has_short_names_for() -> None:
    from vllm.config.quantization import ONLINE_QUANT_SHORTHAND_NAMES

    assert {*SCHEMES, "online"} == set(ONLINE_QUANT_SHORTHAND_NAMES)


def test_schemes_of_experts_quantize_no_other_layer() -> None:
    from vllm.config.quantization import _ONLINE_SHORTHANDS

    found = {name for name, scheme in _ONLINE_SHORTHANDS.items() if scheme.linear is None}
    assert found == {name for name, scheme in SCHEMES.items() if scheme.experts}


@pytest.mark.slow
def test_no_scheme_has_a_kernel_below_vllms_lowest_capability() -> None:
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    lowest = OnlineQuantizationConfig.get_min_capability()
    assert min(scheme.capabilities.start for scheme in SCHEMES.values()) == lowest


@pytest.mark.parametrize("scheme", ["fp8_per_tensor", "fp8_per_block", "mxfp8", "mxfp4"])
def test_marlin_is_the_kernel_of_the_lowest_capability(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.quantization.utils import marlin_utils_fp4, marlin_utils_fp8
    from vllm.platforms import PlatformEnum

    tables: dict[str, Any] = {
        "fp8_per_tensor": linear._POSSIBLE_FP8_KERNELS,
        "fp8_per_block": linear._POSSIBLE_FP8_BLOCK_KERNELS,
        "mxfp8": linear._POSSIBLE_MXFP8_KERNELS,
        "mxfp4": linear._POSSIBLE_MXFP4_KERNELS,
    }
    names = [kernel.__name__ for kernel in tables[scheme][PlatformEnum.CUDA]]
    assert any(name.startswith("Marlin") for name in names)

    class Gpu:
        capability = 0

        def is_cuda(self) -> bool:
            return True

        def has_device_capability(self, wanted: int) -> bool:
            return wanted <= self.capability

    gpu = Gpu()
    utils = marlin_utils_fp4 if scheme == "mxfp4" else marlin_utils_fp8
    supported = getattr(utils, f"is_{'fp4' if scheme == 'mxfp4' else 'fp8'}_marlin_supported")
    monkeypatch.setattr(utils, "current_platform", gpu)
    found = []
    for gpu.capability in (70, 75, 80, 89, 90, 100, 120):
        found.append((gpu.capability, supported()))
    known = SCHEMES[scheme].capabilities  # type: ignore[index]
    assert found == [(capability, capability in known) for capability, _ in found]


def test_channels_of_float8_need_a_kernel_that_quantizes_activations() -> None:
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

    source = inspect.getsource(Fp8PtpcOnlineLinearMethod.create_weights)
    assert "Requires SM89+" in source
    assert SCHEMES["fp8_per_channel"].capabilities == range(89, NEWEST)


def test_nvfp4_is_of_one_family_of_gpus() -> None:
    from vllm.model_executor.layers.quantization.online.nvfp4 import Nvfp4OnlineMoEMethod

    source = inspect.getsource(Nvfp4OnlineMoEMethod.__init__)
    assert "is_device_capability_family(100)" in source
    assert SCHEMES["nvfp4_per_token"].capabilities == range(100, 110)


def test_caches_on_a_cpu_are_those_of_its_attention() -> None:
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    assert set(CPUAttentionBackend.supported_kv_cache_dtypes) == CACHES_ON_CPU


@pytest.mark.parametrize("table", ["FP8_BLOCK", "MXFP8", "MXFP4"])
def test_vllm_has_no_kernel_for_other_schemes_on_a_cpu_without_amx(
    table: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.kernels import linear
    from vllm.platforms import PlatformEnum

    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    kernels = getattr(linear, f"_POSSIBLE_{table}_KERNELS").get(PlatformEnum.CPU, [])
    assert not any(kernel.is_supported(None)[0] for kernel in kernels)
    assert [name for name, scheme in SCHEMES.items() if scheme.on_cpu] == ["fp8_per_channel"]


MATRICES = {
    "of weights": torch.randn(257, 96) * torch.logspace(-8, 2, 257)[:, None],
    "with a row of zeros": torch.cat([torch.zeros(1, 64), torch.randn(3, 64)]),
    "of the smallest scale": torch.randn(4, 64) * 1e-9,
    "of every second number between two of float8": torch.linspace(-448, 448, 4096).view(4, -1),
}


@pytest.mark.slow  # imports vllm
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("matrix", MATRICES)
def test_channels_are_quantized_as_vllm_does_bit_by_bit(
    matrix: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.model_executor.layers.quantization.online.fp8 import Fp8PtpcOnlineLinearMethod

    from trainer.student import quantization

    layer = torch.nn.Module()
    layer.weight = torch.nn.Parameter(MATRICES[matrix].to(dtype), requires_grad=False)
    layer.tp_size = 1
    method = object.__new__(Fp8PtpcOnlineLinearMethod)
    method.requantization_source, method.requantization_source_parameters = None, {}
    method.fp8_linear = _Kernel()  # type: ignore[assignment]
    given = layer.weight.detach().clone()
    method.process_weights_after_loading(layer)
    monkeypatch.setattr(quantization, "PART_ENTRIES", 100)
    numbers, scales = quantization.channels(given)
    assert torch.equal(numbers.view(torch.uint8), layer.weight.t().view(torch.uint8))
    assert torch.equal(scales, layer.weight_scale)


class _Kernel:
    """A kernel that keeps what was quantized."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Nothing."""

    def input_quant_key(self) -> None:
        return None


def test_blocks_of_32_are_rounded_as_vllm_does_bit_by_bit() -> None:
    from vllm.model_executor.layers.quantization.utils.mxfp8_utils import (
        _mxfp8_e4m3_quantize_torch,
    )

    given = torch.randn(64, 96, generator=torch.Generator().manual_seed(0)).bfloat16()
    numbers, scales = _mxfp8_e4m3_quantize_torch(given)
    blocks = numbers.float().view(64, 3, 32) * torch.exp2(scales.float() - 127)[..., None]
    assert torch.equal(rounded(given, GRIDS["mxfp8"]), blocks.view(64, 96).bfloat16())


def test_float4_with_scales_of_float8_is_rounded_as_vllm_does() -> None:
    from vllm.model_executor.layers.quantization.utils import nvfp4_emulation_utils as vllms

    given = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    whole = 6 * 448 / given.abs().max()
    numbers, scales = vllms.ref_nvfp4_quant(given, whole, 16)
    blocks = numbers.view(64, 6, 16) * (scales / whole)[..., None]
    torch.testing.assert_close(rounded(given, GRIDS["nvfp4"]), blocks.view(64, 96))
