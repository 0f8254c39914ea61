"""What the files of a model directory say without transformers, and what is wrong with them."""

from __future__ import annotations

import os.path
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_opd.models.tokenizer import Text, eos_ids, read_json

HUB_ID = re.compile(r"^[\w.-]{1,96}/[\w.-]{1,96}$")


def is_hub_id(model: str) -> bool:
    """Whether a config's model is of the shape of an id.

    A directory's path is absolute once the config is read: what lies in the working directory under
    the id's name is another model.
    """
    return bool(HUB_ID.fullmatch(model))


MEDIA = ("vision_config", "audio_config", "thinker_config")
"""Keys of configurations of models for more than text."""

REDIRECTS = ("speculators_config", "configuration_files", "text_model_id", "audio_model_id")
"""Keys of a config.json that have vLLM or transformers load another model or configuration."""
ADAPTER, BASE = "adapter_config.json", "base_model_name_or_path"
"""With peft installed, transformers loads the model that an adapter's configuration names."""


class ModelError(Exception):
    """A model directory that cannot be used; ``remedy`` says what to do."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message, remedy)
        self.message, self.remedy = message, remedy


@dataclass(frozen=True)
class ModelFiles:
    """A model directory whose JSON files and tokenizer could be read."""

    path: Path
    config: dict[str, Any]
    tokenizer: dict[str, Any]
    tokens: int
    eos: tuple[int, ...]
    base: str | None = None
    """The model that an adapter beside it names."""

    @classmethod
    def read(cls, model: str, weights: bool = True) -> ModelFiles | None:
        """The files of a local model; None for a hub id. Raises ModelError.

        ``weights``: whether they must be there too.
        """
        if is_hub_id(model):
            return None
        if not (os.path.isabs(model) and os.path.isdir(model)):
            remedy = "check the path; a hub id whose first part is a folder here is a path, too"
            raise ModelError(f"no such directory: {model[:200]}", remedy)
        path = Path(model)
        missing = [n for n in ("config.json", "tokenizer.json") if not (path / n).is_file()]
        if missing:
            raise ModelError(f"{path} has no {', '.join(missing)}", "save both there")
        if weights and not list(path.glob("*.safetensors")):
            raise ModelError(f"{path} has no *.safetensors", "save the weights as safetensors")
        lacking = missing_shards(path)
        if weights and lacking:
            message = f"{path} lacks weights that its index names: {', '.join(lacking)}"
            raise ModelError(message, "copy the missing files")
        try:
            return cls(
                path=path,
                config=read_json(path / "config.json"),
                tokenizer=read_json(path / "tokenizer.json"),
                tokens=Text(path).size,
                eos=eos_ids(path),
                base=_text(read_json(path / ADAPTER).get(BASE)),
            )
        except Exception as error:  # the tokenizers library raises bare Exceptions
            raise ModelError(
                f"{path} cannot be read: {type(error).__name__}: {error}", "save the model again"
            ) from error

    @property
    def vocabulary(self) -> int | None:
        """Rows of the embedding."""
        return self._number("vocab_size")

    @property
    def positions(self) -> int | None:
        """Longest sequence."""
        return self._number("max_position_embeddings")

    @property
    def head_size(self) -> int | None:
        """Size of an attention head."""
        hidden, heads = self._number("hidden_size"), self._number("num_attention_heads")
        return self._number("head_dim") or (hidden // heads if hidden and heads else None)

    @property
    def no_student(self) -> str:
        """Why the trainer cannot train it, as the end of a sentence; empty if it perhaps can."""
        media = [key for key in MEDIA if self.config.get(key) is not None]
        layers = self.config.get("layer_types")
        if media:
            return f"has a {media[0]}: models that see or hear cannot be trained yet"
        if self.config.get("is_encoder_decoder"):
            return "has an encoder: it cannot be trained"
        if self.config.get("model_type") == "llama4_text" or (
            isinstance(layers, list) and "chunked_attention" in layers
        ):
            return "attends in chunks, which packed sequences would share: it cannot be trained"
        return ""

    @property
    def redirects(self) -> list[str]:
        """What in it would have another model loaded in its place: keys, each after its file."""
        found = [f"config.json: {key}" for key in REDIRECTS if self.config.get(key) is not None]
        return found if self.base is None else [*found, f"{ADAPTER}: {BASE}"]

    @property
    def code(self) -> list[str]:
        """Classes of its own code that it names."""
        named = self.config.get("auto_map")
        return [str(one) for one in named.values()] if isinstance(named, dict) else []

    def same_tokenizer(self, other: ModelFiles) -> bool:
        """Whether token ids mean the same to both."""
        mine, theirs = self.tokenizer, other.tokenizer
        return (mine.get("model", {}).get("vocab"), mine.get("added_tokens")) == (
            theirs.get("model", {}).get("vocab"),
            theirs.get("added_tokens"),
        )

    def _number(self, name: str) -> int | None:
        value = self.config.get(name)
        return value if isinstance(value, int) and value > 0 else None


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def missing_shards(path: Path) -> list[str]:
    """Weight files that the index names and that are not there. Raises ModelError."""
    try:
        index = read_json(path / "model.safetensors.index.json")
    except ValueError as error:
        message = f"{path}/model.safetensors.index.json is no valid JSON: {error}"
        raise ModelError(message, "save the model again") from error
    named = index.get("weight_map", {})
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        message = f"{path}/model.safetensors.index.json: weight_map does not map names to files"
        raise ModelError(message, "save the model again")
    return sorted({name for name in named.values() if not os.path.isfile(path / name)})
