"""The matrices of a model that LoRA adapts, by the headers of its files: no torch."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from async_opd.config.sections.train import LoraConfig
from async_opd.core.errors import in_words
from async_opd.models.model_files import ModelError
from async_opd.models.model_size import VISION, tensors_of

NOT_LINEAR = re.compile(
    r"(^|\.)(lm_head|embed_\w+|\w*embeddings?|wte|wpe|router|experts|(mlp|block_sparse_moe)\.gate)\."
)
"""Parts of the names of embeddings, the head, and a mixture's routers and experts."""


def linear_layers(model: str | Path) -> dict[str, tuple[int, int]]:
    """The linear layers of a local model that can have an adapter: name and (out, in).

    ModelError if its files cannot be read; so do the functions below.
    """
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape, _ in _tensors(model)
        if name.endswith(".weight") and len(shape) == 2
        if not NOT_LINEAR.search(name) and not VISION.search(name)
    }


def trained_entries(model: str | Path, lora: LoraConfig) -> int:
    """Entries of all adapters: these alone have float32 masters, gradients and moments."""
    layers = linear_layers(model)
    return lora.entries(layers[name] for name in lora.adapted(layers, mixture(model)))


def target_names(model: str | Path, lora: LoraConfig) -> list[str]:
    """The last parts of the names of the layers that have an adapter, each once."""
    if lora.targets != "all-linear":
        return sorted(lora.targets)
    adapted = lora.adapted(linear_layers(model), mixture(model))
    return sorted({name.rpartition(".")[2] for name in adapted})


def adapter_kwargs(lora: LoraConfig | None, model: str) -> dict[str, Any]:
    """The arguments of a student's engine that applies adapters; none if they are merged.

    One adapter at a time: each weight sync replaces it. vLLM wraps the head of some families too,
    unless it gets the names of layers, and then cannot score prompts beside other requests: the
    wrapped head takes all rows for one row a request. ModelError if the model cannot be read.
    """
    if lora is None or lora.sync == "merged":
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": lora.engine_rank,
        "lora_target_modules": target_names(model, lora),
    }


def mixture(model: str | Path) -> bool:
    """Whether a local model has experts."""
    return any(".experts." in name for name, _, _ in _tensors(model))


def _tensors(model: str | Path) -> list[tuple[str, tuple[int, ...], str]]:
    try:
        return tensors_of(Path(model))
    except Exception as error:  # safetensors' exception has no base class
        message = f"the weights of {model} cannot be read: {in_words(error)}"
        raise ModelError(message, "save the model again") from error
