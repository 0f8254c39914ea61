"""A model's config.json chooses no code: not even a kernel that transformers would download."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers.modeling_utils
from transformers import AutoConfig

from async_opd.core.errors import StageError
from tests.trainer.models import tiny_model
from trainer.student.loading import EmptyStudent


@pytest.fixture
def student(tmp_path: Path) -> Path:
    tiny_model().save_pretrained(tmp_path / "student")
    return tmp_path / "student"


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that transformers would have downloaded."""
    found: list[str] = []

    def lazy_import(implementation: str, **_: Any) -> None:
        found.append(implementation)

    monkeypatch.setattr(transformers.modeling_utils, "lazy_import_flash_attention", lazy_import)
    monkeypatch.setattr(transformers.modeling_utils, "is_kernels_available", lambda: True)
    return found


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
@pytest.mark.parametrize("named", ["kernels-community/flash-attn2", "flash_attention_2"])
def test_the_attention_that_a_model_names_is_not_downloaded(
    student: Path, asked: list[str], key: str, named: str
) -> None:
    file = student / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: named}))
    model = EmptyStudent(student).model
    assert asked == []
    assert model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize("name", ["stranger/model", "/none/model"])
def test_a_name_that_is_no_directory_is_not_looked_for_elsewhere(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def searched(*_: Any, **named: Any) -> Any:
        pytest.fail("transformers looks for it")

    monkeypatch.setattr(AutoConfig, "from_pretrained", searched)
    with pytest.raises(StageError, match="no such directory"):
        EmptyStudent(Path(name))
