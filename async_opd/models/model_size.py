"""How large a model is, by the headers of its safetensors files: no torch, no weight is read."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from async_opd.models.model_files import ModelError
from async_opd.models.tokenizer import read_json, text_settings

FLOATS = ("F64", "F32", "F16", "BF16")
"""Stored types that an engine casts to its own; others (quantized weights) it keeps."""
STORED_BYTES = {"F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1, "BOOL": 1, "I16": 2, "I64": 8}


@dataclass(frozen=True)
class ModelSize:
    """``floats`` entries in floating point and ``others`` bytes of other types, as stored.

    ``hidden``, ``inner`` and ``layers`` are the widths and the depth of the decoder, ``vocabulary``
    is the number of rows of its head.
    """

    floats: int
    others: int
    hidden: int
    inner: int
    layers: int
    vocabulary: int

    @classmethod
    def read(cls, model: str | Path) -> ModelSize:
        """Of a local directory. ModelError if its files cannot be read."""
        path = Path(model)
        try:
            floats = others = 0
            for _, shape, kind in tensors_of(path):
                floats += math.prod(shape) * (kind in FLOATS)
                others += math.prod(shape) * (kind not in FLOATS) * STORED_BYTES.get(kind, 4)
            settings = text_settings(read_json(path / "config.json"))
            hidden = int(settings.get("hidden_size") or settings.get("n_embd") or 0)
            inner = int(settings.get("intermediate_size") or 4 * hidden)
            layers = int(settings.get("num_hidden_layers") or settings.get("n_layer") or 0)
            vocabulary = int(settings.get("vocab_size") or 0)
        except Exception as error:  # safetensors has an exception of its own, without a base
            message = f"the size of {path} cannot be read: {type(error).__name__}: {error}"
            raise ModelError(message, "save the model again") from error
        return cls(floats, others, hidden, inner, layers, vocabulary)

    def head_bytes(self, dtype: str) -> int:
        """Bytes of the head's weight in ``dtype``."""
        return self.vocabulary * self.hidden * (4 if dtype == "float32" else 2)

    def engine_bytes(self, dtype: str) -> int:
        """Bytes of its weights in an engine that computes in ``dtype``."""
        return self.floats * (4 if dtype == "float32" else 2) + self.others


def tensors_of(path: Path) -> list[tuple[str, tuple[int, ...], str]]:
    """Name, shape and stored type of each tensor: of the files that the index names, or of all."""
    index: Mapping[str, Any] = read_json(path / "model.safetensors.index.json").get(
        "weight_map", {}
    )
    files = sorted(path / name for name in set(index.values()))
    found = []
    for file in files or sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                tensor = opened.get_slice(name)
                found.append((name, tuple(tensor.get_shape()), str(tensor.get_dtype())))
    return found
