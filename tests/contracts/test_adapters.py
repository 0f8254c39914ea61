"""The parts of vLLM's LoRA layers that adapters in an engine use."""

from __future__ import annotations

import pytest
import torch

from tests.contracts import contract

pytestmark = pytest.mark.slow  # imports vllm

LORA = "vllm.lora"
LAYER = "model.layers.0.self_attn.q_proj"
SENT = f"base_model.model.{LAYER}"
WORKER = "rollouter/freshness_worker.py"


def test_an_adapter_is_made_of_tensors_in_the_form_of_peft() -> None:
    with contract(
        f"{LORA}.lora_model.LoRAModel.from_lora_tensors",
        "takes tensors, and scales by alpha / rank",
        by=WORKER,
    ):
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        tensors = {
            f"{SENT}.lora_A.weight": torch.ones(4, 8),
            f"{SENT}.lora_B.weight": torch.full((16, 4), 3.0),
        }
        helper = PEFTHelper(r=4, lora_alpha=4, target_modules=[])
        made = LoRAModel.from_lora_tensors(
            1, tensors, helper, device="cpu", dtype=torch.float32, weights_mapper=None
        )
        assert list(made.loras) == [LAYER]
        assert torch.equal(made.loras[LAYER].lora_b, tensors[f"{SENT}.lora_B.weight"])


def test_alpha_equal_to_the_rank_scales_by_one() -> None:
    with contract("vllm.lora.peft_helper.PEFTHelper", "scales by lora_alpha / r", by=WORKER):
        from vllm.lora.peft_helper import PEFTHelper

        helper = PEFTHelper(r=4, lora_alpha=4, target_modules=[])
        assert helper.vllm_lora_scaling_factor == 1.0


def test_the_name_of_a_tensor_has_its_layer_and_its_factor() -> None:
    with contract(
        f"{LORA}.utils.parse_fine_tuned_lora_name",
        "gives the layer's name and whether it is A",
        by=WORKER,
    ):
        from vllm.lora.utils import parse_fine_tuned_lora_name

        assert parse_fine_tuned_lora_name(f"{SENT}.lora_A.weight", None) == (LAYER, True)
        assert parse_fine_tuned_lora_name(f"{SENT}.lora_B.weight", None) == (LAYER, False)


def test_a_request_names_its_adapter_by_number() -> None:
    with contract("vllm.lora.request.LoRARequest", "takes name, number and path", by="held_rows"):
        from vllm.lora.request import LoRARequest

        assert LoRARequest("student", 1, "nowhere").adapter_id == 1
