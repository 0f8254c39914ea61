"""A VLM student: its parts, what is frozen, adapters, and its weights' names."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import safe_open

from async_opd.config.sections.train import LoraConfig
from async_opd.core.errors import StageError
from tests.trainer.models import tiny_model
from tests.trainer.vision.seeing import CPU, folder_of, gradients, rank_of, seen, student_of
from tests.vision_models import FAMILIES
from trainer.learner import Learner
from trainer.saving.export import save_model
from trainer.student.adapters import LORA, add_adapters
from trainer.student.check import check_placed, check_student
from trainer.student.loading import platform_of, set_attention
from trainer.student.named_weights import frozen_names, named_weights
from trainer.utilization import ModelSize
from trainer.vision.parts import freeze, vision_parameters

pytest.importorskip("torchvision")


def files_of(folder: Path) -> dict[str, torch.Tensor]:
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_have_the_names_and_values_of_the_files(family: str) -> None:
    stored = files_of(folder_of(family))
    named = dict(named_weights(student_of(family), torch.float32))
    assert named.keys() == stored.keys()
    assert all(torch.equal(named[name], stored[name]) for name in stored)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_check_at_the_start_takes_the_student(family: str) -> None:
    model = student_of(family)
    check_placed(rank_of(model, family).student, check_student(model))


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_have_the_same_logits_with_a_mask_of_the_whole_row(family: str) -> None:
    model = student_of(family)
    apart = rank_of(model, family).backward([seen(family, [], [0]).micro_batch()]).sums
    set_attention(model, "sdpa", platform_of(CPU, False))
    whole = rank_of(model, family).backward([seen(family, [], [0]).micro_batch()]).sums
    assert whole["distillation"] == pytest.approx(apart["distillation"], rel=1e-5)


@pytest.mark.parametrize("parts", [["vision_tower"], ["projector"], ["vision_tower", "projector"]])
@pytest.mark.parametrize("family", FAMILIES)
def test_frozen_parts_have_neither_gradients_nor_moments(family: str, parts: Any) -> None:
    model = student_of(family)
    freeze(model, parts)
    rank = rank_of(model, family)
    rank.backward([seen(family, [0], []).micro_batch()])
    names = {f"model.{name}": part for part, name, _ in vision_parameters(model) if part in parts}
    assert set(names.values()) == set(parts)
    assert not names.keys() & gradients(model).keys()
    rank.apply(1e-3)
    frozen = {id(p) for n, p in model.named_parameters() if n in names}
    assert not frozen & {id(p) for p in rank.optimizer.state}


def test_a_resumed_student_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    def resumed(family: str) -> Learner:
        model = student_of(family)
        freeze(model, ["vision_tower"])
        return Learner(rank_of(model, family))

    first, again = seen("qwen3_vl", [0], []), seen("qwen3_vl", [1], [0])
    one, two = resumed("qwen3_vl"), resumed("qwen3_vl")
    one.train_batch(first.samples, first.encoded)
    one.capture(version=1)
    one.write(str(tmp_path))
    assert two.restore(str(tmp_path))[1] == 1
    for learner in (one, two):
        learner.train_batch(again.samples, again.encoded)
    other = dict(two.model.named_parameters())
    assert all(torch.equal(value, other[name]) for name, value in one.model.named_parameters())


def test_a_student_that_reads_text_has_no_part_to_freeze() -> None:
    with pytest.raises(
        StageError, match="names vision_tower, and Qwen3ForCausalLM has no vision part"
    ):
        freeze(tiny_model(), ["vision_tower"])


@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_are_in_the_language_model_only(family: str) -> None:
    pytest.importorskip("peft")
    model = student_of(family)
    add_adapters(model, LoraConfig(rank=2))
    adapted = [name for name, _ in model.named_parameters() if LORA in name]
    assert adapted
    assert all(name.startswith("model.language_model.") for name in adapted)
    rank_of(model, family).backward([seen(family, [0], []).micro_batch()])
    assert set(gradients(model)) == set(adapted)


def test_images_cost_the_towers_entries_for_each_patch_a_third_of_frozen_ones() -> None:
    size = ModelSize(10, 0, (), (), tower=7, projector=3, patches=4)
    header: Any = SimpleNamespace(segments=(), tokens=5, response_tokens=0)
    assert size.of_sample(header, 2) == 6 * (10 * 5 + (7 * 4 + 3) * 2)
    model = student_of("qwen2_5_vl")
    trained = ModelSize.of(model)
    freeze(model, ["vision_tower", "projector"])
    frozen = ModelSize.of(model)
    assert frozen.tower == pytest.approx(trained.tower / 3, rel=0.01)
    assert frozen.decoder == trained.decoder


def test_images_that_cannot_be_seen_or_are_missing_are_refused_by_name() -> None:
    rank = rank_of(student_of("llava"), "llava")
    rank.student.sight = None
    with pytest.raises(StageError, match="p0/0 has images, and the student"):
        rank.backward([seen("llava", [0]).micro_batch()])
    from dataclasses import replace

    rank = rank_of(student_of("llava"), "llava")
    with pytest.raises(StageError, match="1 of 1 images of a micro-batch are not there"):
        rank.backward([replace(seen("llava", [0]).micro_batch(), images={})])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sync_has_no_frozen_part_and_an_export_has_all(family: str) -> None:
    model = student_of(family)
    freeze(model, ["vision_tower"])
    rank = rank_of(model, family)
    sent, exported = dict(rank.weights.sent()), dict(rank.weights.exported(torch.float32))
    assert exported.keys() == files_of(folder_of(family)).keys()
    left_out = exported.keys() - sent.keys()
    assert left_out == set(frozen_names(model)) != set()
    assert all("visual" in name or "vision_tower" in name for name in left_out)
    assert any("merger" in name or "projector" in name for name in sent)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_export_loads_with_its_processor(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForImageTextToText

    from async_opd.models.processor import ImageProcessor

    model, target = student_of(family), str(tmp_path / "saved")
    weights = rank_of(model, family).weights.exported(torch.float32)
    save_model(model, str(folder_of(family)), target, weights)
    assert ImageProcessor.load(target).placeholder_id > 0
    again = dict(AutoModelForImageTextToText.from_pretrained(target).named_parameters())
    assert all(torch.equal(again[name], one) for name, one in model.named_parameters())
