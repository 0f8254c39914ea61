"""New weights of a mixture of experts in a real engine, whose CPU kernels have packed the old."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.engines import QUICKSTART
from tests.rollouter.test_student_engine import perturb, world

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("engines_fork")]


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_experts_per_tok": 2,
    "initializer_range": 0.3,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "max_position_embeddings": 256,
}


def mixture(name: str, **sizes: int) -> Any:
    """Four experts in its second layer; Glm4Moe's router corrects its scores by a buffer."""
    import torch
    import transformers

    torch.manual_seed(0)
    student = json.loads((QUICKSTART / "models" / "student" / "config.json").read_text())
    own: dict[str, Any] = {"mlp_only_layers": [0], "num_experts": 4, "norm_topk_prob": True}
    if name == "Glm4Moe":
        own = {"first_k_dense_replace": 1, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}
    config = getattr(transformers, f"{name}Config")(
        vocab_size=student["vocab_size"], **{**SIZES, **own, **sizes}
    )
    return getattr(transformers, f"{name}ForCausalLM")(config)


async def distances(path: Path, workers: int) -> dict[str, float]:
    """Largest differences between the engine's log-probabilities and transformers'."""
    import torch

    from trainer.student.named_weights import named_weights

    found = {}
    async with world(path, workers) as w:
        w.publisher._source = lambda: named_weights(w.model, torch.float32, changing=True)
        for parameter in w.model.parameters():
            perturb(parameter)
        await w.push()
        found["weights"] = await w.error()
        if type(w.model).__name__ != "Glm4MoeForCausalLM":
            return found
        gate = w.model.model.layers[1].mlp.gate
        gate.e_score_correction_bias.data += torch.tensor([3.0, -2.0, 1.0, 0.0])
        found["before the buffer"] = await w.error()
        await w.push()
        found["buffer"] = await w.error()
    return found


def measured(name: str, path: Path, workers: int = 1, **sizes: int) -> dict[str, float]:
    """The distances of a family."""
    mixture(name, **sizes).save_pretrained(path)
    shutil.copy(QUICKSTART / "models" / "student" / "tokenizer.json", path)
    return asyncio.run(distances(path, workers))


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    return measured("Glm4Moe", tmp_path_factory.mktemp("mixture"))


def test_a_qwen3_mixture_generates_with_the_experts_that_it_received(tmp_path: Path) -> None:
    """All of a layer come as two tensors."""
    assert measured("Qwen3Moe", tmp_path)["weights"] < 1e-4


@pytest.mark.long
def test_two_workers_each_take_their_part_of_every_expert(tmp_path: Path) -> None:
    """Of 32 columns: vLLM 0.32 cannot reload experts on a CPU that it has padded."""
    found = measured("Qwen3Moe", tmp_path, workers=2, moe_intermediate_size=64)
    assert found["weights"] < 1e-4


def test_a_mixture_generates_with_the_experts_that_it_received(seen: dict[str, float]) -> None:
    """UnquantizedFusedMoEMethod._setup_kernel packs on a CPU at the first load only."""
    assert seen["weights"] < 1e-4


def test_a_buffer_that_changed_arrives(seen: dict[str, float]) -> None:
    assert seen["before the buffer"] > 0.1
    assert seen["buffer"] < 1e-4
