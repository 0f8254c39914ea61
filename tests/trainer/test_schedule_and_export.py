"""The learning rate's schedule, and the saved model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from async_opd.config.train import TrainConfig
from tests.trainer.models import tiny_model
from trainer.saving.export import save_model
from trainer.schedule import learning_rate

TRAIN = TrainConfig(lr=1.0, warmup_steps=4, steps=20, min_lr_ratio=0.1)


@pytest.mark.parametrize(("step", "rate"), [(0, 0.25), (3, 1.0), (4, 1.0), (19, 0.1)])
def test_the_cosine_schedule_has_its_corners(step: int, rate: float) -> None:
    assert learning_rate(step, TRAIN) == pytest.approx(rate)


def test_the_cosine_is_half_way_down_in_the_middle() -> None:
    train = TRAIN.model_copy(update={"warmup_steps": 0, "steps": 11})
    assert learning_rate(5, train) == pytest.approx(0.55)


def test_a_constant_schedule_stays() -> None:
    train = TRAIN.model_copy(update={"schedule": "constant"})
    assert learning_rate(19, train) == 1.0


def test_a_run_of_one_step_has_a_rate() -> None:
    train = TRAIN.model_copy(update={"steps": 1, "warmup_steps": 0})
    assert learning_rate(0, train) == 1.0


def saved(tmp_path: Path, quickstart: str, seed: int = 0) -> tuple[Any, Path]:
    model = tiny_model(seed)
    save_model(model, f"{quickstart}/models/student", str(tmp_path / "model"))
    return model, tmp_path / "model"


def test_a_saved_model_loads_with_equal_weights(tmp_path: Path, quickstart: str) -> None:
    from transformers import AutoModelForCausalLM

    model, path = saved(tmp_path, quickstart)
    loaded = AutoModelForCausalLM.from_pretrained(path)
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, loaded.state_dict()[name])


def test_a_saved_model_has_all_files_of_its_source_but_weights_and_config(
    tmp_path: Path, quickstart: str
) -> None:
    source = tmp_path / "source"
    shutil.copytree(f"{quickstart}/models/student", source)
    kept = ("spiece.model", "tokenization_own.py", "vocab.txt", "preprocessor_config.json")
    left = ("pytorch_model.bin", "model-00001-of-00002.safetensors", ".gitattributes")
    for name in (*kept, *left, "model.safetensors.index.json"):
        (source / name).write_text(name)
    (source / "additional_chat_templates").mkdir()
    (source / "additional_chat_templates" / "rag.jinja").write_text("x")
    save_model(tiny_model(0), str(source), str(tmp_path / "model"))
    files = {str(p.relative_to(tmp_path / "model")) for p in (tmp_path / "model").rglob("*.*")}
    usual = {"config.json", "generation_config.json", "model.safetensors"}
    usual |= {"tokenizer.json", "tokenizer_config.json"}
    assert files == {*usual, *kept, "additional_chat_templates/rag.jinja"}


def test_a_saved_model_has_a_config_of_its_own(tmp_path: Path, quickstart: str) -> None:
    model, path = saved(tmp_path, quickstart)
    config = json.loads((path / "config.json").read_text())
    assert config["hidden_size"] == model.config.hidden_size


def test_a_saved_model_has_its_tokenizer(tmp_path: Path, quickstart: str) -> None:
    from transformers import AutoTokenizer

    _, path = saved(tmp_path, quickstart)
    assert AutoTokenizer.from_pretrained(path).decode([20, 21]) == "01"


def test_saving_again_replaces_the_model(tmp_path: Path, quickstart: str) -> None:
    saved(tmp_path, quickstart, seed=0)
    saved(tmp_path, quickstart, seed=1)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_save_that_fails_leaves_the_old_model(
    tmp_path: Path, quickstart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = saved(tmp_path, quickstart)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(model, "save_pretrained", fail)
    with pytest.raises(OSError, match="disk full"):
        save_model(model, f"{quickstart}/models/student", str(path))
    assert (path / "model.safetensors").is_file()
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_save_after_an_interrupted_one_leaves_only_the_model(
    tmp_path: Path, quickstart: str
) -> None:
    for leftover in ("model.part", "model.old"):
        (tmp_path / leftover).mkdir()
    saved(tmp_path, quickstart)
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_a_constant_schedule_warms_up_too() -> None:
    train = TRAIN.model_copy(update={"schedule": "constant"})
    assert learning_rate(0, train) == 0.25


def test_the_rate_never_rises_after_the_warm_up() -> None:
    rates = [learning_rate(step, TRAIN) for step in range(TRAIN.warmup_steps, TRAIN.steps)]
    assert rates == sorted(rates, reverse=True)


def test_a_cosine_may_end_at_zero() -> None:
    train = TRAIN.model_copy(update={"min_lr_ratio": 0.0})
    assert learning_rate(19, train) == pytest.approx(0.0, abs=1e-12)


def test_a_rename_that_fails_leaves_the_old_model(
    tmp_path: Path, quickstart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, path = saved(tmp_path, quickstart)
    rename = Path.rename

    def fail(self: Path, target: Path) -> Path:
        if self.name == "model.part":
            raise OSError("no such device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(OSError, match="no such device"):
        save_model(tiny_model(1), f"{quickstart}/models/student", str(path))
    kept = load_file(path / "model.safetensors")
    assert all(torch.equal(kept[name], old.state_dict()[name]) for name in kept)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model"]


def test_a_save_that_stops_half_way_leaves_the_old_weights(
    tmp_path: Path, quickstart: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, path = saved(tmp_path, quickstart)
    new = tiny_model(1)
    write = new.save_pretrained

    def interrupted(part: Path, **named: Any) -> None:
        write(part, **named)
        raise KeyboardInterrupt

    monkeypatch.setattr(new, "save_pretrained", interrupted)
    with pytest.raises(KeyboardInterrupt):
        save_model(new, f"{quickstart}/models/student", str(path))
    kept = load_file(path / "model.safetensors")
    assert all(torch.equal(kept[name], old.state_dict()[name]) for name in kept)
