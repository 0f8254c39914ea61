"""The committed models of examples/vision are what the example promises."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from async_opd.config.load import load_config
from async_opd.models.processor import ImageProcessor
from async_opd.models.tokenizer import Text

EXAMPLES = Path(__file__).parents[2] / "examples"
VISION = EXAMPLES / "vision"
PICTURED = ("count", "larger", "digit")
TEACHERS = {**dict.fromkeys(PICTURED, "teacher-vision"), "sort": "teacher-text"}
MODELS = ("student", "teacher-vision", "teacher-text")


@pytest.fixture(scope="module")
def supervised() -> Iterator[ModuleType]:
    """The module with which the script trains, which finds its neighbors in its own folder."""
    sys.path.insert(0, str(VISION))
    try:
        import supervised as found

        yield found
    finally:
        sys.path.remove(str(VISION))


def model(name: str) -> Path:
    return VISION / "models" / name


def test_models_are_trained_on_the_pixels_and_tokens_of_their_processor(
    supervised: ModuleType,
) -> None:
    processor = ImageProcessor.load(str(model("student")))
    ((text, _, picture),) = supervised.questions("digit", 1, np.random.default_rng(0))
    file = BytesIO()
    picture.save(file, "PNG")
    inputs = processor.inputs([file.getvalue()])
    assert torch.allclose(inputs["pixel_values"], supervised.pixels([picture]), atol=1e-6)
    short = Text(model("student")).chat.render(
        [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": text}]}]
    )
    ids = np.asarray(Text(model("student")).plain(short), np.int32)
    assert processor.expand(ids, [file.getvalue()]).tolist() == supervised._prompt(text, picture)


@pytest.mark.parametrize(
    "file", ["tokenizer.json", "chat_template.jinja", "generation_config.json"]
)
def test_the_models_share_their_tokenizer_template_and_end(file: str) -> None:
    assert len({(model(name) / file).read_bytes() for name in MODELS}) == 1


def test_those_that_see_are_qwen3_vl_and_the_other_is_qwen3() -> None:
    configs = {name: json.loads((model(name) / "config.json").read_text()) for name in MODELS}
    assert {name: config["model_type"] for name, config in configs.items()} == {
        "student": "qwen3_vl",
        "teacher-vision": "qwen3_vl",
        "teacher-text": "qwen3",
    }


def test_the_manifest_has_the_accuracies_and_a_time_of_at_most_ten_minutes() -> None:
    made = json.loads((VISION / "models" / "MANIFEST.json").read_text(encoding="utf-8"))
    measured = made["accuracy"]
    for task, teacher in TEACHERS.items():
        assert measured["student"][task] <= 0.4 * measured[teacher][task]
        assert measured[teacher][task] >= 0.95
    assert made["seconds"] <= 600


def test_the_models_stay_below_five_megabytes() -> None:
    files = [path for path in (VISION / "models").rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 5_000_000


def test_the_config_routes_each_task_to_its_teacher() -> None:
    config = load_config(EXAMPLES / "vision.yaml")
    assert config.teacher_of("sort") == "reads"
    assert {config.teacher_of(task) for task in PICTURED} == {"sees"}
    assert len((EXAMPLES / "vision.yaml").read_text(encoding="utf-8").splitlines()) <= 40
