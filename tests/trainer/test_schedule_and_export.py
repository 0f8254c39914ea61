"""The learning rate's schedule, and the saved model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from async_opd.config.sections.train import TrainConfig
from tests.trainer.models import tiny_model
from trainer.learner import learning_rate
from trainer.saving.export import export_dtype, save_model, write_weights
from trainer.student.named_weights import named_weights

TRAIN = TrainConfig(lr=1.0, warmup_steps=4, steps=20, min_lr_ratio=0.1)


@pytest.mark.parametrize(
    ("step", "changed", "rate"),
    [
        (0, {}, 0.25),
        (3, {}, 1.0),
        (4, {}, 1.0),
        (19, {}, 0.1),
        pytest.param(5, {"warmup_steps": 0, "steps": 11}, 0.55, id="half way"),
        pytest.param(19, {"min_lr_ratio": 0.0}, 0.0, id="down to zero"),
        pytest.param(19, {"schedule": "constant"}, 1.0, id="constant"),
        pytest.param(0, {"schedule": "constant"}, 0.25, id="constant after a warm-up"),
        pytest.param(0, {"steps": 1, "warmup_steps": 0}, 1.0, id="one step"),
    ],
)
def test_a_step_has_its_rate(step: int, changed: dict[str, Any], rate: float) -> None:
    train = TRAIN.model_copy(update=changed)
    assert learning_rate(step, train) == pytest.approx(rate, abs=1e-12)


def test_the_rate_never_rises_after_the_warm_up() -> None:
    rates = [learning_rate(step, TRAIN) for step in range(TRAIN.warmup_steps, TRAIN.steps)]
    assert rates == sorted(rates, reverse=True)


def export(model: Any, source: str, folder: Path, **given: Any) -> None:
    """Writes the model with its weights in the precision that is given."""
    weights = named_weights(model, given.get("dtype", torch.float32))
    save_model(model, source, str(folder), weights, **given)


def saved(tmp_path: Path, quickstart: str, seed: int = 0) -> tuple[Any, Path]:
    model = tiny_model(seed)
    export(model, f"{quickstart}/models/student", tmp_path / "model")
    return model, tmp_path / "model"


def test_a_saved_model_loads_with_config_and_tokenizer(tmp_path: Path, quickstart: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, path = saved(tmp_path, quickstart)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, loaded.state_dict()[name])
    config = json.loads((path / "config.json").read_text())
    assert config["hidden_size"] == model.config.hidden_size
    assert AutoTokenizer.from_pretrained(path).decode([20, 21]) == "01"


def test_a_model_of_several_files_loads_with_equal_weights(tmp_path: Path, quickstart: str) -> None:
    from transformers import AutoModelForCausalLM

    model, path = tiny_model(0), tmp_path / "model"
    export(model, f"{quickstart}/models/student", path, file_bytes=20_000)
    files = sorted(path.glob("*.safetensors"))
    total = len(files)
    assert total > 2
    assert [f.name for f in files] == [
        f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)
    ]
    index = json.loads((path / "model.safetensors.index.json").read_text())
    stored = {name: load_file(path / file) for name, file in index["weight_map"].items()}
    assert index["metadata"]["total_size"] == sum(t[name].nbytes for name, t in stored.items())
    assert not list(path.glob(".*"))
    loaded = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in model.state_dict().items())


def test_one_file_is_in_memory_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held, sizes = [0], []

    def taken() -> Any:
        for size in (40, 40, 40, 300, 40):
            held[0] += size
            yield f"w{held[0]}", torch.zeros(size, dtype=torch.uint8)
            assert held[0] <= 300

    def written(tensors: dict[str, torch.Tensor], *_: Any, **__: Any) -> None:
        sizes.append(sum(tensor.nbytes for tensor in tensors.values()))
        held[0] -= sizes[-1]

    monkeypatch.setattr("trainer.saving.export.save_file", written)
    monkeypatch.setattr("trainer.saving.export.flush", lambda path: path.touch())
    write_weights(tmp_path, taken(), file_bytes=100)
    assert sizes == [80, 40, 300, 40]


def test_a_model_in_bfloat16_has_rounded_weights(tmp_path: Path, quickstart: str) -> None:
    from transformers import AutoModelForCausalLM

    model, path = tiny_model(0), tmp_path / "model"
    export(model, f"{quickstart}/models/student", path, dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    assert loaded.dtype == torch.bfloat16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.bfloat16(), dict(loaded.named_parameters())[name])


@pytest.mark.parametrize(
    ("wanted", "source", "dtype"),
    [
        ("auto", {"dtype": "bfloat16"}, torch.bfloat16),
        ("auto", {"torch_dtype": "float16"}, torch.bfloat16),
        ("auto", {"text_config": {"dtype": "bfloat16"}}, torch.bfloat16),
        ("auto", {"dtype": "float32"}, torch.float32),
        ("auto", {}, torch.float32),
        ("float32", {"dtype": "bfloat16"}, torch.float32),
        ("bfloat16", {"dtype": "float32"}, torch.bfloat16),
    ],
)
def test_auto_is_the_precision_of_the_source(
    wanted: Any, source: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(source))
    assert export_dtype(wanted, str(tmp_path)) == dtype


def test_a_saved_model_has_the_other_files_of_its_source(tmp_path: Path, quickstart: str) -> None:
    source = tmp_path / "source"
    shutil.copytree(f"{quickstart}/models/student", source)
    kept = ("spiece.model", "tokenization_own.py", "vocab.txt", "preprocessor_config.json")
    left = ("pytorch_model.bin", "model-00001-of-00002.safetensors", ".gitattributes")
    for name in (*kept, *left, "model.safetensors.index.json"):
        (source / name).write_text(name)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("x")
    export(tiny_model(0), str(source), tmp_path / "model")
    files = {str(p.relative_to(tmp_path / "model")) for p in (tmp_path / "model").rglob("*.*")}
    usual = {"config.json", "generation_config.json", "model.safetensors"}
    usual |= {"tokenizer.json", "tokenizer_config.json"}
    assert files == {*usual, *kept, "additional_chat_templates/rag.jinja"}


def test_saving_again_leaves_only_the_model(tmp_path: Path, quickstart: str) -> None:
    for leftover in ("model.part", "model.old"):
        (tmp_path / leftover).mkdir()
    for seed in (0, 1):
        saved(tmp_path, quickstart, seed)
        assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    ("place", "error"),
    [("save_file", OSError), ("_copy_rest", KeyboardInterrupt), ("rename", OSError)],
)
def test_a_save_that_stops_half_way_leaves_the_old_model(
    tmp_path: Path,
    quickstart: str,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: type[BaseException],
) -> None:
    old, path = saved(tmp_path, quickstart)
    rename = Path.rename

    def refused(self: Path, target: Path) -> Path:
        if self.name == "model.part":
            raise error("disk full")
        return rename(self, target)

    if place == "rename":
        monkeypatch.setattr(Path, "rename", refused)
    else:
        monkeypatch.setattr(f"trainer.saving.export.{place}", Mock(side_effect=error("disk full")))
    with pytest.raises(error, match="disk full"):
        export(tiny_model(1), f"{quickstart}/models/student", path)
    kept = load_file(path / "model.safetensors")
    assert all(torch.equal(kept[name], old.state_dict()[name]) for name in kept)
    if error is OSError:
        assert [entry.name for entry in tmp_path.iterdir()] == ["model"]
