"""Published names and values are those of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.weight_sync.layout import experts_apart
from tests.trainer import families
from tests.trainer.models import tiny_model
from trainer.student.named_weights import _full, _layers_of, named_weights
from trainer.student.sharding import blocks_of


def mixture() -> Any:
    """Two experts, which transformers fuses in memory; the head is not tied."""
    sizes = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1}
    return families.made("Qwen3Moe", num_hidden_layers=1, head_dim=16, **sizes)


def corrected_mixture() -> Any:
    """Its router corrects scores by a buffer, which the checkpoint has in float32."""
    sizes = {"moe_intermediate_size": 16, "n_routed_experts": 2, "num_experts_per_tok": 1}
    groups = {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
    made = families.made("Glm4Moe", head_dim=16, **sizes, **groups)
    made.model.layers[1].mlp.gate.e_score_correction_bias.data += 1 / 3
    return made


BUILDS: list[Callable[[], Any]] = [
    tiny_model,
    mixture,
    corrected_mixture,
    lambda: families.made("HrmText"),  # in files query, key and value are one matrix
    lambda: families.made("OlmoHybrid", layer_types=["linear_attention", "full_attention"]),
]


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
def test_engines_get_the_same_tensors_once_experts_are_apart(build: Any) -> None:
    model = build()
    published = dict(named_weights(model, torch.float32))
    sent = dict(experts_apart(named_weights(model, torch.float32, changing=True)))
    assert sent.keys() == published.keys()
    assert all(torch.equal(sent[name], published[name]) for name in sent)


@pytest.mark.parametrize(("build", "layer"), [(mixture, 0), (corrected_mixture, 1)])
def test_all_experts_of_a_layer_are_sent_as_the_models_own_tensors(build: Any, layer: int) -> None:
    model = build()
    sent = dict(named_weights(model, torch.float32, copied=False, changing=True))
    experts, part = model.model.layers[layer].mlp.experts, f"model.layers.{layer}.mlp.experts"
    own = {
        f"{part}.*.gate_proj.weight+up_proj.weight": experts.gate_up_proj,
        f"{part}.*.down_proj.weight": experts.down_proj,
    }
    assert {name for name in sent if ".experts." in name} == own.keys()
    assert all(sent[name].data_ptr() == tensor.data_ptr() for name, tensor in own.items())


@pytest.mark.parametrize("other", ["transposed", "refused"])
def test_experts_that_are_converted_otherwise_are_sent_one_by_one(
    other: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import core_model_loading

    revert = core_model_loading.revert_weight_conversion

    def otherwise(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        if other == "refused" and any(one.dtype == torch.int64 for one in tensors.values()):
            raise ValueError("it takes weights only")
        made = revert(model, tensors)
        return {n: t.t().contiguous() if ".experts." in n else t for n, t in made.items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", otherwise)
    sent = dict(named_weights(mixture(), torch.float32, changing=True))
    assert {f"model.layers.0.mlp.experts.{e}.up_proj.weight" for e in range(2)} <= sent.keys()


@pytest.mark.parametrize("build", BUILDS)
def test_every_family_is_converted_layer_by_layer(build: Any) -> None:
    model = build()
    layer_of = _layers_of(model)
    names = [name for name, _ in model.named_parameters()]
    assert len({layer_of(name) for name in names}) > len(blocks_of(model)) > 0


def test_a_rule_that_joins_layers_makes_them_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import core_model_loading

    def norms_first(model: Any, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        norms = [t for name, t in tensors.items() if "input_layernorm" in name]
        others = {name: t for name, t in tensors.items() if "input_layernorm" not in name}
        return ({"norms": torch.cat(norms)} if norms else {}) | others

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", norms_first)
    published = dict(named_weights(tiny_model(), torch.float32))
    assert published["norms"].shape == (64,)


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
