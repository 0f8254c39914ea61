"""The tensors of a model's output head in its files, and the formula of its logits. No torch.

logits = cap(states · weightᵀ + bias) · scale, with cap(x) = soft_cap · tanh(x / soft_cap)

The order is vLLM's (model_executor/layers/logits_processor.py). For objectives over the
whole vocabulary teachers return hidden states, and the trainer
(trainer/losses/teacher_heads.py) loads the tensors that ``HeadFiles`` describes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open

from async_opd.core.errors import in_words
from async_opd.models.json_files import read_json
from async_opd.models.model_files import ModelError
from async_opd.models.own_files import weights_file
from async_opd.models.tokenizer import text_settings

HEADS = ("lm_head", "embed_out", "output_layer")
EMBEDDINGS = ("embed_tokens", "wte", "embed_in", "word_embeddings", "tok_embeddings")
UNSUPPORTED = (
    "dim_model_base",
    "mup_width_multiplier",
    "output_mult",
    "output_multiplier",
    "output_multiplier_scale",
)
"""Keys of configurations whose logits do not follow the formula above."""


def pack_again(model: Any, head: type) -> None:
    """Packs what vLLM's layer-wise reload leaves as it was, on a CPU; ``head``: ParallelLMHead.

    The reload leaves the packed copy of a head that shares its tensor with the embedding as it was,
    and a mixture's experts unpacked (measured with vLLM 0.32: logits off by 2 nats in both cases).
    """
    for module in model.modules():
        method: Any = getattr(module, "quant_method", None)
        if isinstance(module, head):
            method.process_weights_after_loading(module)
        elif (kernel := getattr(method, "moe_kernel", None)) is not None:
            kernel.fused_experts.process_weights_after_loading(module)


@dataclass(frozen=True)
class LogitShape:
    """The map of a model's logits x before the softmax: scale · soft_cap · tanh(x / soft_cap).

    With ``soft_cap`` None the map is scale · x.
    """

    scale: float = 1.0
    soft_cap: float | None = None

    @classmethod
    def of(cls, config: Mapping[str, Any], name: str) -> LogitShape:
        """Reads the map from a config.json. ModelError with ``name`` for an unsupported map."""
        settings = text_settings(config)
        refused = [key for key in UNSUPPORTED if settings.get(key) is not None]
        if refused:
            raise ModelError(
                f"{name} changes its logits by {', '.join(refused)}, which is not supported",
                "use loss.support teacher_topk: vLLM then computes the logits itself",
            )
        try:
            soft_cap = float(settings.get("final_logit_softcapping") or 0.0) or None
            return cls(_scale(settings), soft_cap)
        except (TypeError, ValueError, ArithmeticError) as error:
            message = (
                f"config.json of {name} scales its logits by a value that is not a number: {error}"
            )
            raise ModelError(message, "save the model again") from error


@dataclass(frozen=True)
class TensorPlace:
    """A tensor in a safetensors file."""

    file: Path
    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class HeadFiles:
    """A model's head: ``weight`` [V, H], ``bias`` [V] or none, and the map of its logits."""

    weight: TensorPlace
    bias: TensorPlace | None
    shape: LogitShape

    @property
    def vocabulary(self) -> int:
        """V: rows of the head, padding included."""
        return self.weight.shape[0]

    @property
    def hidden(self) -> int:
        """H: the width of the hidden states."""
        return self.weight.shape[1]

    @classmethod
    def read(cls, model: str | Path) -> HeadFiles:
        """Finds the head of a local model directory. Raises ModelError."""
        path = Path(model)
        try:
            config = read_json(path / "config.json")
            places = _places(path)
        except Exception as error:  # safetensors' exception has no base class
            message = f"the weights of {path} cannot be read: {in_words(error)}"
            raise ModelError(message, "save the model again") from error
        shape = LogitShape.of(config, str(path))
        weight = _weight(path, places, text_settings(config))
        bias = [p for n, p in places.items() if n.endswith(".bias") and _module(n) in HEADS]
        return cls(weight, bias[0] if bias else None, shape)


def _places(path: Path) -> dict[str, TensorPlace]:
    """All tensors of the model that may belong to its head."""
    wanted = (*HEADS, *EMBEDDINGS)
    places = {}
    for file in _weight_files(path):
        with safe_open(weights_file(file), framework="np") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dictionary
                if _module(name) in wanted:
                    shape = tuple(opened.get_slice(name).get_shape())
                    places[name] = TensorPlace(file, name, shape)
    return places


def _weight_files(path: Path) -> list[Path]:
    """The weight files that may hold the head: by the index, or all."""
    index = read_json(path / "model.safetensors.index.json").get("weight_map", {})
    names = {file for name, file in index.items() if _module(name) in (*HEADS, *EMBEDDINGS)}
    return sorted(path / name for name in names) if names else sorted(path.glob("*.safetensors"))


def _module(name: str) -> str:
    """``lm_head`` of ``model.lm_head.weight``."""
    return name.rpartition(".")[0].rpartition(".")[2]


def _weight(path: Path, places: dict[str, TensorPlace], settings: Mapping[str, Any]) -> TensorPlace:
    """The head's matrix: its own, or the embedding if the two are tied."""
    own, embedding = _matrices(places, HEADS), _matrices(places, EMBEDDINGS)
    # config.json may lack the key: then a separate matrix, if there is one, is the head.
    tied = settings.get("tie_word_embeddings")
    found = (embedding or own) if tied else (own if own or tied is False else embedding)
    if len(found) != 1:
        names = ", ".join(place.name for place in found) or "none"
        raise ModelError(
            f"{path}: expected one output head, found {names}",
            "use loss.support teacher_topk: vLLM then computes the logits itself",
        )
    return found[0]


def _matrices(places: dict[str, TensorPlace], modules: Sequence[str]) -> list[TensorPlace]:
    return [
        place
        for name, place in places.items()
        if _module(name) in modules and name.endswith(".weight") and len(place.shape) == 2
    ]


def _scale(settings: Mapping[str, Any]) -> float:
    """The factor of the logits, as in each model's ``compute_logits`` in vLLM.

    Cohere and Falcon-H1 multiply; Granite divides by muP's scaling, HyperCLOVA X multiplies by it.
    """
    scale = float(settings.get("logit_scale") or 1.0) * float(
        settings.get("lm_head_multiplier") or 1.0
    )
    mup = float(settings.get("logits_scaling") or 1.0)
    return scale * mup if settings.get("model_type") == "hyperclovax" else scale / mup
