"""Model directories: whatever is in them, the command works or names the directory."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fuzz.command import STUDENT, Said, checked, good, written
from tests.fuzz.conftest import examples

pytestmark = pytest.mark.slow

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=5,
)
NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "model.safetensors.index.json",
    "model.safetensors",
    "chat_template.jinja",
)
KEYS = st.sampled_from(
    [
        "vocab_size",
        "max_position_embeddings",
        "hidden_size",
        "num_attention_heads",
        "head_dim",
        "eos_token_id",
        "text_config",
        "logit_scale",
        "final_logit_softcapping",
        "logits_scaling",
        "tie_word_embeddings",
        "chat_template",
        "weight_map",
        "model",
        "added_tokens",
    ]
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def read(folder: Path, changes: dict[str, bytes], support: str) -> Said:
    """``check`` of a config whose teacher has these files in place of its real ones."""
    model = folder / "model"
    shutil.rmtree(model, ignore_errors=True)
    model.mkdir()
    for file in STUDENT.iterdir():
        shutil.copyfile(file, model / file.name)
    for name, content in changes.items():
        (model / name).unlink(missing_ok=True)
        (model / name).write_bytes(content)
    config = good(folder)
    config["teachers"]["sort"]["model"] = str(model)
    config["loss"]["support"] = support
    return checked(written(folder, config))


@pytest.mark.parametrize("support", ["teacher_topk", "full_vocab"])
def test_the_model_that_is_mutated_here_is_good(folder: Path, support: str) -> None:
    assert read(folder, {}, support).code == 0


SUPPORTS = st.sampled_from(["teacher_topk", "full_vocab"])


@examples(40)
@given(
    changes=st.dictionaries(
        st.sampled_from(NAMES),
        st.binary(max_size=60) | JSON.map(json.dumps).map(str.encode) | st.just(b"{{ 1 / 0 }}"),
        min_size=1,
        max_size=2,
    ),
    support=SUPPORTS,
)
def test_any_files(folder: Path, changes: dict[str, bytes], support: str) -> None:
    read(folder, changes, support)


@examples(60)
@given(name=st.sampled_from(NAMES[:5]), values=st.dictionaries(KEYS, JSON), support=SUPPORTS)
def test_json_files_with_other_values(
    folder: Path, name: str, values: dict[str, Any], support: str
) -> None:
    own = json.loads((STUDENT / name).read_text()) if (STUDENT / name).exists() else {}
    read(folder, {name: json.dumps(own | values).encode()}, support)


@examples(30)
@given(keep=st.integers(0, 3000), at=st.integers(0, 1500), new=st.binary(max_size=16))
def test_weights_with_other_bytes(folder: Path, keep: int, at: int, new: bytes) -> None:
    content = (STUDENT / "model.safetensors").read_bytes()
    changed = content[:at] + new + content[at + len(new) :]
    read(folder, {"model.safetensors": changed[:keep] if keep < 1500 else changed}, "full_vocab")
