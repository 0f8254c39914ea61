"""Prompts expand as transformers' processors do it, and images become a model's inputs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.core.row import Media
from async_opd.media.decode import decode
from async_opd.models.processor import ImageProcessor, ProcessorError
from tests.data.pictures import picture
from tests.vision_models import FAMILIES, SIZE, gemma3

WIDE, TALL = picture(100, 60), picture(30, 200, "blue")


MADE = FAMILIES | {"gemma3": gemma3}


@pytest.fixture(scope="module", params=MADE)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of each family."""
    return MADE[request.param](tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def processor(model: Path) -> ImageProcessor:
    return ImageProcessor.load(str(model))


@pytest.fixture(scope="module")
def theirs(model: Path) -> Any:
    """transformers' processor of the same model."""
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(model)


def short(theirs: Any, images: int) -> Any:
    """Ids of a prompt with one placeholder an image, between texts."""
    text = "b".join(["a", *[theirs.image_token] * images, "c"])
    return np.array(theirs.tokenizer(text, add_special_tokens=False).input_ids, np.int32)


@pytest.mark.parametrize("images", [[], [WIDE], [WIDE, TALL], [TALL, TALL, WIDE]])
def test_a_prompt_expands_to_the_ids_of_transformers(
    processor: ImageProcessor, theirs: Any, images: list[bytes]
) -> None:
    text = "b".join(["a", *[theirs.image_token] * len(images), "c"])
    expected = theirs(
        text=[text], images=[decode(one) for one in images] or None, add_special_tokens=False
    )
    found = processor.expand(short(theirs, len(images)), images)
    assert found.tolist() == expected["input_ids"][0]
    assert found.dtype == np.int32


def test_an_image_has_at_most_its_bounds_tokens(processor: ImageProcessor, theirs: Any) -> None:
    ids = short(theirs, 1)
    added = len(processor.expand(ids, [WIDE])) - len(ids) + 1
    assert 1 < added <= processor.tokens(Media("", len(WIDE), 100, 60))
    one, other = (processor.tokens(Media("", 1, *size)) for size in ((100, 30), (30, 100)))
    assert one == other  # also if it is turned


def test_images_become_the_tensors_of_transformers(processor: ImageProcessor, theirs: Any) -> None:
    import torch

    expected = theirs.image_processor([decode(WIDE), decode(TALL)], return_tensors="pt")
    found = processor.inputs([WIDE, TALL])
    assert found.keys() == set(expected.keys()) - set(theirs.unused_input_names)
    assert all(torch.equal(found[name], expected[name]) for name in found)
    assert processor.inputs([]) == {}


def test_every_placeholder_is_kept_out_of_responses(processor: ImageProcessor, theirs: Any) -> None:
    assert processor.placeholder_id in processor.unsampled_ids
    video = getattr(theirs, "video_token_id", None)
    assert video is None or video in processor.unsampled_ids
    assert all(0 < one < SIZE for one in processor.unsampled_ids)


@pytest.mark.parametrize("images", [0, 2])
def test_places_and_images_must_be_as_many(
    processor: ImageProcessor, theirs: Any, images: int
) -> None:
    with pytest.raises(ValueError, match=f"has 1 placeholders .* for {images} images"):
        processor.expand(short(theirs, 1), [WIDE] * images)


def test_settings_of_the_config_replace_the_models_own(tmp_path: Path) -> None:
    folder = FAMILIES["qwen3_vl"](tmp_path)
    small = ImageProcessor.load(str(folder), processor_kwargs={"max_pixels": 32 * 32 * 2})
    assert small.tokens(Media("", 1, 1000, 600)) <= 2
    ids = np.array([small.placeholder_id], np.int32)
    assert len(small.expand(ids, [picture(1000, 600)])) <= 2


@pytest.mark.parametrize("name", ["weights_only", "subfolder", "revision"])
def test_a_setting_of_the_loading_is_refused_before_a_load_with_it(name: str, model: Path) -> None:
    with pytest.raises(ProcessorError, match=f"has no setting {name}"):
        ImageProcessor.load(str(model), processor_kwargs={name: False})
    with pytest.raises(ProcessorError, match=r"has no setting max_pixel: one of .*size"):
        ImageProcessor.load(str(model), processor_kwargs={"max_pixel": 784})


@pytest.mark.parametrize("file", ["processor_config.json", "audio_tokenizer_config.json"])
def test_a_further_model_that_a_processor_names_is_not_loaded(tmp_path: Path, file: str) -> None:
    """transformers would load it by its own rules: with pickles, or code after a question."""
    made = MADE["gemma3"](tmp_path)
    content = {"audio_tokenizer": {"audio_tokenizer_name_or_path": "other/model"}}
    (made / file).write_text(json.dumps(content))
    with pytest.raises(ProcessorError, match=f"{file}.* is of a further"):
        ImageProcessor.load(str(made))


def test_a_model_of_text_has_no_image_processor(quickstart: str) -> None:
    with pytest.raises(ProcessorError, match="processor"):
        ImageProcessor.load(f"{quickstart}/models/student")


@pytest.mark.slow
def test_a_processor_is_loaded_without_a_line_about_kernels_of_other_machines() -> None:
    student = Path(__file__).parents[2] / "examples" / "vision" / "models" / "student"
    load = "from async_opd.models.processor import ImageProcessor"
    command = [sys.executable, "-c", f"{load}; ImageProcessor.load({str(student)!r})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout + done.stderr == ""
