"""Published names and values are those of the checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer import families
from tests.trainer.models import tiny_model
from trainer.student.named_weights import _full, _layers_of, named_weights
from trainer.student.sharding import blocks_of


def mixture() -> Any:
    """Two experts, which transformers fuses in memory; the head is not tied."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            num_experts=2,
            num_experts_per_tok=1,
            tie_word_embeddings=False,
        )
    )


def corrected_mixture() -> Any:
    """Its router corrects scores by a buffer, which the checkpoint has in float32."""
    from transformers import Glm4MoeConfig, Glm4MoeForCausalLM

    made = Glm4MoeForCausalLM(
        Glm4MoeConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=48,
            moe_intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            n_routed_experts=2,
            num_experts_per_tok=1,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        )
    )
    made.model.layers[1].mlp.gate.e_score_correction_bias.data += 1 / 3
    return made


def joined_when_saved() -> Any:
    """In files query, key and value of a layer are one matrix."""
    return families.made("HrmText")


def divided_when_saved() -> Any:
    """In files convolutions of a layer are several."""
    return families.made("OlmoHybrid", layer_types=["linear_attention", "full_attention"])


BUILDS = [tiny_model, mixture, corrected_mixture, joined_when_saved, divided_when_saved]


@pytest.mark.parametrize("build", BUILDS)
def test_weights_are_those_of_the_checkpoint(build: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = build()
    model.save_pretrained(tmp_path)
    written = load_file(tmp_path / "model.safetensors")
    published = dict(named_weights(model, torch.float32))
    assert published.keys() == written.keys()
    assert all(torch.equal(published[name], written[name]) for name in written)


@pytest.mark.parametrize("build", BUILDS)
def test_every_family_is_converted_layer_by_layer(build: Any) -> None:
    model = build()
    layer_of = _layers_of(model)
    names = [name for name, _ in model.named_parameters()]
    assert len({layer_of(name) for name in names}) > len(blocks_of(model)) > 0


def test_a_rule_that_joins_tensors_of_several_layers_makes_them_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from transformers import core_model_loading

    def norms_first(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        norms = [t for name, t in tensors.items() if "input_layernorm" in name]
        others = {name: t for name, t in tensors.items() if "input_layernorm" not in name}
        return ({"norms": torch.cat(norms)} if norms else {}) | others

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", norms_first)
    published = dict(named_weights(tiny_model(), torch.float32))
    assert published["norms"].shape == (64,)


def test_a_tied_head_is_published_once() -> None:
    names = [name for name, _ in named_weights(tiny_model(), torch.float32)]
    assert "lm_head.weight" not in names


def test_a_head_of_its_own_is_published() -> None:
    names = [name for name, _ in named_weights(mixture(), torch.float32)]
    assert "lm_head.weight" in names


def test_a_buffer_of_the_checkpoint_keeps_its_dtype() -> None:
    published = dict(named_weights(corrected_mixture(), torch.bfloat16))
    buffer = published.pop("model.layers.1.mlp.gate.e_score_correction_bias")
    assert (buffer.dtype, buffer.tolist()) == (torch.float32, [pytest.approx(1 / 3)] * 2)
    assert {weight.dtype for weight in published.values()} == {torch.bfloat16}


@pytest.mark.parametrize("build", [tiny_model, corrected_mixture])
def test_a_later_step_changes_no_copy(build: Any) -> None:
    model = build()
    published = list(named_weights(model, torch.float32))
    before = [copy.clone() for _, copy in published]
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor += 1
    assert all(torch.equal(a, b) for a, (_, b) in zip(before, published, strict=True))


def test_of_a_mesh_of_one_they_are_copies_too() -> None:
    """A gather from one rank returns that rank's own memory: torch's full_tensor."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import distribute_tensor

    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        shard = distribute_tensor(torch.zeros(3), mesh)
        copy = _full(shard, torch.float32, copied=True)
        shard.to_local().fill_(1.0)
    finally:
        torch.distributed.destroy_process_group()
    assert copy.tolist() == [0.0] * 3


def test_weights_travel_in_the_wire_dtype() -> None:
    assert {w.dtype for _, w in named_weights(tiny_model(), torch.bfloat16)} == {torch.bfloat16}
