"""The planner's bytes of the vision tower, compared with what autograd keeps of a real tower."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.config.device_defaults import Recomputation
from async_opd.config.load import load_config
from async_opd.media.engine_prompts import KEPT_BYTES
from async_opd.memory.pools import Machine, pool_memory
from async_opd.memory.step import (
    Precision,
    Step,
    backward,
    kept_of_tower,
    layer_of_tower,
    loss,
    peak,
    states,
)
from async_opd.models.model_size import ModelSize, Tower
from tests.trainer.vision.seeing import folder_of
from trainer.layers import recompute_activations
from trainer.vision.parts import freeze

MODEL = Path(__file__).parents[2] / "examples" / "vision" / "models" / "student"
IMAGES = 64
GRID = 4
TOWER = Tower(406_957_056, 1024, 4096, 24, 1536, 4)
SIZE = ModelSize(
    2_127_532_032, 0, 2048, 6144, 28, 151_936, embeddings=151_936, query=2048, key=1024, heads=16,
    query_norms=True, tower=TOWER,
)  # fmt: skip


def kept(folder: Path, half: bool, recompute: Recomputation, still: bool) -> tuple[int, int]:
    """Bytes of the pixels and of what a forward pass leaves beside; tokens of the images.

    ``still``: the tower is frozen.
    """
    from transformers import AutoModelForImageTextToText

    dtype = torch.bfloat16 if half else torch.float32
    model: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype)
    if still:
        freeze(model, ["vision_tower"])
    if recompute != "none":
        recompute_activations(model, recompute)
    tower = ModelSize.read(folder).tower
    assert tower is not None
    patches = IMAGES * GRID * GRID
    shape = (patches, tower.patch)
    given: dict[str, Any] = {"image_grid_thw": torch.tensor([[1, GRID, GRID]] * IMAGES)}
    if model.config.model_type == "llava":  # its tower takes whole images
        side = model.config.vision_config.patch_size * GRID
        shape, given = (IMAGES, 3, side, side), {}
    pixels = torch.rand(shape)
    own = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    found = {pixels.untyped_storage().data_ptr(): pixels.untyped_storage()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model.model.get_image_features(pixels if given else pixels.to(dtype), **given)
    return sum(storage.nbytes() for storage in found.values()), patches // tower.merged


def test_the_towers_shape_is_read_from_config_and_weights() -> None:
    size = ModelSize.read(MODEL)
    tower = size.tower
    assert tower is not None
    assert (tower.hidden, tower.inner, tower.layers) == (64, 128, 2)
    assert (tower.patch, tower.merged) == (3 * 2 * 8 * 8, 4)
    assert 0 < tower.projector < tower.entries
    decoder = size.floats - tower.entries - size.embeddings * size.hidden - size.outside
    assert size.block == decoder // size.layers


@pytest.mark.parametrize(
    ("recompute", "still"),
    [("none", False), ("full", False), ("none", True)],
    ids=["none", "full", "frozen below its projector"],
)
@pytest.mark.parametrize("half", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["example", "qwen3_vl", "qwen2_5_vl", "llava"])
def test_what_autograd_keeps_is_planned_to_a_tenth(
    family: str, half: bool, recompute: Recomputation, still: bool
) -> None:
    folder = MODEL if family == "example" else folder_of(family)
    nbytes, tokens = kept(folder, half, recompute, still)
    tower, precision = ModelSize.read(folder).tower, Precision(2, 2) if half else Precision(4, 4)
    assert tower is not None
    assert kept_of_tower(tower, precision, recompute, tokens, still) == pytest.approx(
        nbytes, rel=0.1
    )


def test_results_of_products_are_kept_if_others_are_computed_again() -> None:
    """Of a patch in bfloat16, once with a gate: x, q, k, v, result, output, MLP."""
    tower = Tower(0, 64, 256, 1, 0, 1)
    plain, gated = (
        kept_of_tower(replace(tower, gated=gate), Precision(2, 2), "selective", 1)
        for gate in (False, True)
    )
    assert plain == 2 * (64 + 6 * 64 + 256)
    assert gated == 2 * (64 + 6 * 64 + 2 * 256)


def test_the_more_is_computed_again_the_less_is_kept_of_images() -> None:
    kinds: tuple[Recomputation, ...] = ("none", "selective", "full")
    none, selective, full = (kept_of_tower(TOWER, Precision(2, 2), kind, 16384) for kind in kinds)
    assert none > selective > full
    again = [layer_of_tower(TOWER, Precision(2, 2), kind, 16384) for kind in kinds]
    assert again == sorted(again)


def test_images_are_in_the_peak_of_a_vlm_student_and_in_no_others() -> None:
    step = Step(SIZE, ranks=2)
    assert peak(step)["images"] > 0
    blind = Step(ModelSize(**{**vars(SIZE), "tower": None}), ranks=2)
    assert not any("images" in of(blind) for of in (loss, backward))


def test_a_frozen_tower_has_no_moments_and_of_images_their_pixels_only() -> None:
    trained, frozen = Step(SIZE), Step(SIZE, still=TOWER.entries, vision_frozen=True)
    saved = states(trained)["moments"] - states(frozen)["moments"]
    assert saved == 8 * TOWER.entries
    assert states(trained)["parameters"] - states(frozen)["parameters"] == 2 * TOWER.entries
    assert peak(frozen)["images"] == 4 * TOWER.patch * TOWER.merged * frozen.tokens


def test_all_outside_of_the_towers_layers_is_gathered_with_the_root() -> None:
    whole = replace(TOWER, block=TOWER.entries // TOWER.layers)
    some = replace(TOWER, block=(TOWER.entries - 1_000_000) // TOWER.layers)
    gathered = [
        loss(Step(replace(SIZE, tower=tower), ranks=2))["gathered parameters"]
        for tower in (whole, some)
    ]
    assert gathered[1] - gathered[0] == 2 * (some.outside - whole.outside)


def test_hosts_of_models_that_see_have_room_for_images_and_others_need_none() -> None:
    config = load_config(MODEL.parents[2] / "vision.yaml", ["data.image_cache_mib=16"])
    pools = {pool.name: pool.host for pool in pool_memory(config, Machine("cpu", 1 << 40))}
    assert pools["train"]["image cache"] == 16 << 20
    assert pools["rollout"]["image cache"] == (16 << 20) + KEPT_BYTES
    assert "image cache" in pools["teachers.sees"]
    assert "image cache" not in pools["teachers.reads"]
