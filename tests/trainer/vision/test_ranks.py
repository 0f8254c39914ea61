"""Sharded VLM students: gloo processes, of which some have no image, and one process."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.sections.train import LoraConfig
from tests.trainer.processes import spread
from tests.trainer.vision.seeing import gradients, rank_of, seen, student_of
from tests.vision_models import FAMILIES, SIZE
from trainer.batches.micro_batches import MicroBatch
from trainer.rank import Rank
from trainer.student.adapters import add_adapters
from trainer.student.named_weights import named_weights
from trainer.student.reference import rows_to_hold
from trainer.vision.parts import freeze

pytest.importorskip("torchvision")
pytestmark = pytest.mark.slow

SHOWN = [[[0, 1], []], [[], []], [[], [], []], [[], [2]]]
"""Images of the samples of four micro-batches, which the ranks divide in this order."""
LONGEST = 700
CASES: dict[str, dict[str, Any]] = {
    "trained": {},
    "frozen": {"freeze": ["vision_tower", "projector"]},
    "tower frozen": {"freeze": ["vision_tower"]},
    "recomputed": {"recompute": True},
    "adapters": {"lora": LoraConfig(rank=2)},
    "reduced after each": {"reduce_gradients": "micro_batch"},
}


def micro_batches(family: str) -> list[MicroBatch]:
    return [seen(family, *shown).micro_batch() for shown in SHOWN]


def made(family: str, case: dict[str, Any]) -> Any:
    from trainer.layers import recompute_activations

    model = student_of(family)
    torch.manual_seed(0)
    freeze(model, case.get("freeze", []))
    if "lora" in case:
        add_adapters(model, case["lora"])
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    if "recompute" in case:
        recompute_activations(model)
    return model


def of_rank(family: str, ranks: int, rank: int) -> list[dict[str, torch.Tensor]]:
    """Of each case the whole gradients; then whole weights and the held row with an image."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh, found = init_device_mesh("cpu", (ranks,)), []
    for case in CASES.values():
        model = made(family, case)
        reduce = case.get("reduce_gradients", "step")
        one = rank_of(model, family, mesh, reduce_gradients=reduce)
        own = len(SHOWN) // ranks
        one.backward(micro_batches(family)[own * rank : own * (rank + 1)])
        found.append({name: grad.full_tensor() for name, grad in gradients(model).items()})
    found.append(dict(named_weights(model, torch.float32)))
    found.append({"held": held_logprobs(one)})
    return found


def held_logprobs(rank: Rank) -> torch.Tensor:
    """Of the held row with an image; of several ranks a collective."""
    rows = rows_to_hold(SIZE, LONGEST, rank.student.sight)
    assert rows[-1].media
    return torch.from_numpy(rank.student.reference(rows).logprobs[-1])


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_without_an_image_stay_in_step(family: str, ranks: int, tmp_path: Path) -> None:
    micro_batches(family), student_of(family)  # files that both processes read
    of_all = spread(ranks, partial(of_rank, family, ranks), tmp_path)
    for index, case in enumerate(CASES.values()):
        alone = made(family, case)
        rank_of(alone, family).backward(micro_batches(family))
        expected = gradients(alone)
        for found in (one[index] for one in of_all):
            assert found.keys() == expected.keys()
            one, other = (torch.cat([g[n].flatten() for n in expected]) for g in (found, expected))
            assert (one - other).norm() < 1e-4 * other.norm()
    weights = dict(named_weights(alone, torch.float32))
    assert weights.keys() == of_all[0][-2].keys()
    held = held_logprobs(rank_of(alone, family))
    for found in (one[-1] for one in of_all):
        assert torch.allclose(found["held"], held, atol=1e-5)
