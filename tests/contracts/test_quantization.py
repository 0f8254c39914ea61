"""Settings of a quantization that is taken are numbers and names: vLLM imports nothing by them."""

from __future__ import annotations

from typing import Any

import pytest
import torch


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
