"""The planner's bytes of what sees, compared with what autograd keeps of a real tower."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.load import load_config
from async_opd.media.engine_prompts import KEPT_BYTES
from async_opd.memory.activations import Precision
from async_opd.memory.pools import Machine, pool_memory
from async_opd.memory.step import Step, backward, loss, peak, states
from async_opd.memory.tower import kept_of_tower, layer_of_tower
from async_opd.models.model_size import ModelSize, Tower

MODEL = Path(__file__).parents[2] / "examples" / "vision" / "models" / "student"
IMAGES = 64
GRID = 4
TOWER = Tower(406_957_056, 1024, 4096, 24, 1536, 4)
SIZE = ModelSize(
    2_127_532_032, 0, 2048, 6144, 28, 151_936, embeddings=151_936, query=2048, key=1024, heads=16,
    query_norms=True, tower=TOWER,
)  # fmt: skip


def tower_of_the_example() -> Tower:
    found = ModelSize.read(MODEL).tower
    assert found is not None
    return found


@pytest.fixture(scope="module")
def kept() -> int:
    """Bytes of different tensors that a forward pass of the example's tower leaves."""
    from transformers import AutoModelForImageTextToText

    tower: Any = AutoModelForImageTextToText.from_pretrained(
        MODEL, dtype=torch.float32
    ).model.visual
    own = {weight.untyped_storage().data_ptr() for weight in tower.parameters()}
    found: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    pixels = torch.rand(IMAGES * GRID * GRID, tower_of_the_example().patch)
    grid = torch.tensor([[1, GRID, GRID]] * IMAGES)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        tower(pixels, grid_thw=grid)
    return sum(storage.nbytes() for storage in found.values())


def test_the_towers_shape_is_read_from_config_and_weights() -> None:
    tower = tower_of_the_example()
    assert (tower.hidden, tower.inner, tower.layers) == (64, 128, 2)
    assert (tower.patch, tower.merged) == (3 * 2 * 8 * 8, 4)
    size = ModelSize.read(MODEL)
    decoder = size.floats - tower.entries - size.embeddings * size.hidden
    assert size.block == decoder // size.layers


def test_what_autograd_keeps_is_planned_to_a_third(kept: int) -> None:
    tower = tower_of_the_example()
    tokens = IMAGES * GRID * GRID // tower.merged
    planned = kept_of_tower(tower, Precision(4, 4), "none", tokens)
    assert planned == pytest.approx(kept, rel=1 / 3)


def test_the_more_is_computed_again_the_less_is_kept_of_images() -> None:
    none, selective, full = (
        kept_of_tower(TOWER, Precision(2, 2), kind, 16384) for kind in ("none", "selective", "full")
    )
    assert none > selective > full
    again = [
        layer_of_tower(TOWER, Precision(2, 2), kind, 16384)
        for kind in ("none", "selective", "full")
    ]
    assert again == sorted(again)


def test_images_are_in_the_peak_of_a_student_that_sees_and_in_no_others() -> None:
    step = Step(SIZE, ranks=2)
    assert peak(step)["images"] > 0
    blind = Step(ModelSize(**{**vars(SIZE), "tower": None}), ranks=2)
    assert not any("images" in of(blind) for of in (loss, backward))


def test_a_frozen_tower_has_neither_moments_nor_activations_that_are_kept() -> None:
    trained, frozen = Step(SIZE), Step(SIZE, still=TOWER.entries, sees_still=True)
    saved = states(trained)["moments"] - states(frozen)["moments"]
    assert saved == 8 * TOWER.entries
    assert states(trained)["parameters"] - states(frozen)["parameters"] == 2 * TOWER.entries
    assert "images" not in peak(frozen)


def test_the_projectors_entries_are_told_apart() -> None:
    tower = tower_of_the_example()
    assert 0 < tower.projector < tower.entries


def test_hosts_of_models_that_see_have_room_for_images_and_others_need_none() -> None:
    config = load_config(MODEL.parents[2] / "vision.yaml", ["data.image_cache_mib=16"])
    pools = {pool.name: pool.host for pool in pool_memory(config, Machine("cpu", 1 << 40))}
    assert pools["train"]["image cache"] == 16 << 20
    assert pools["rollout"]["image cache"] == (16 << 20) + KEPT_BYTES
    assert "image cache" in pools["teachers.sees"]
    assert "image cache" not in pools["teachers.reads"]
