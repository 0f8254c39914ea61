"""The teachers' heads: from the hidden states that a teacher sends to its logits.

    model directory ──safetensors, one tensor──► head's weight [V, H] ──× states──► logits

Only the head is read, and of it only the rows that the student has too. Teachers of the same model
share one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from async_opd.core.errors import StageError
from trainer.losses.chunked import project

if TYPE_CHECKING:
    from async_opd.core.config import RunConfig, TeacherConfig

HEADS = ("lm_head.weight", "embed_out.weight")
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")

FACTORS = {"logit_scale": 1, "lm_head_multiplier": 1, "logits_scaling": -1}
"""Config keys by which an architecture multiplies (1) or divides (-1) its logits."""
UNKNOWN = ("dim_model_base", "mup_width_multiplier", "output_multiplier_scale")
"""Config keys that change logits in ways this file does not know."""


@dataclass(frozen=True)
class TeacherHead:
    """logits = cap · tanh(scale · (W h + b) / cap), where there is a cap."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    scale: float = 1.0
    cap: float | None = None

    @property
    def vocabulary(self) -> int:
        """Rows of the weight."""
        return int(self.weight.shape[0])

    def logits(self, states: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Writes logits of states [n, H] to the first n rows of ``out``, and returns these.

        StageError for states of another width than the head's.
        """
        if states.shape[-1] != self.weight.shape[-1]:
            raise StageError(
                "trainer",
                f"hidden states of teacher {self.name} have {states.shape[-1]} columns, its head "
                f"{self.weight.shape[-1]}",
                "the teacher's engine and the trainer must load the same model",
            )
        logits = project(states.to(self.weight.dtype), self.weight, self.bias, out)
        if self.scale != 1:
            logits.mul_(self.scale)
        if self.cap is not None:
            logits.div_(self.cap).tanh_().mul_(self.cap)
        return logits


def load_heads(config: RunConfig, vocabulary: int, device: torch.device) -> dict[str, TeacherHead]:
    """The head of every teacher, by its name; none where the objective needs none.

    ``vocabulary`` is the student's. StageError for a model whose head cannot be read.
    """
    from async_opd.core.loss_config import score_kind

    if score_kind(config.loss) != "hidden":
        return {}
    heads: dict[str, TeacherHead] = {}
    of_model: dict[tuple[str, torch.dtype], TeacherHead] = {}
    for name, teacher in config.teachers.items():
        key = (teacher.model, _dtype(teacher, device))
        if key not in of_model:
            of_model[key] = read_head(name, *key, vocabulary, device, teacher.trust_remote_code)
        heads[name] = of_model[key]
    return heads


def _dtype(teacher: TeacherConfig, device: torch.device) -> torch.dtype:
    """The engine's: states come in it, and logits are to be the engine's own."""
    name = teacher.engine.dtype
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def read_head(
    name: str,
    model: str,
    dtype: torch.dtype,
    vocabulary: int,
    device: torch.device,
    trust_remote_code: bool = False,
) -> TeacherHead:
    """Reads one tensor (two with a bias) from a model directory."""
    from transformers import AutoConfig

    text = AutoConfig.from_pretrained(model, trust_remote_code=trust_remote_code).get_text_config()
    if unknown := [key for key in UNKNOWN if getattr(text, key, None) is not None]:
        raise StageError(
            "trainer",
            f"teacher {name} ({model}) changes its logits by {', '.join(unknown)}",
            "use loss.support teacher_topk or student_topk with this teacher",
        )
    files = tensor_files(Path(model))
    weight = _head_name(name, model, sorted(files), tied=bool(text.tie_word_embeddings))
    bias = weight.removesuffix("weight") + "bias"

    def read(tensor: str) -> torch.Tensor:
        return _rows(files[tensor], tensor, vocabulary).to(device=device, dtype=dtype)

    return TeacherHead(
        name,
        read(weight),
        read(bias) if bias in files and weight.endswith(HEADS) else None,
        _scale(text),
        getattr(text, "final_logit_softcapping", None),
    )


def tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor of a model directory, with or without an index."""
    from safetensors import safe_open

    index = directory / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        return {tensor: directory / file for tensor, file in names.items()}
    found = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file))
    return found


def _head_name(teacher: str, model: str, names: list[str], tied: bool) -> str:
    """The tensor that is the head: its own, or the embedding it is tied to."""
    own = [name for name in names if name.endswith(HEADS)]
    candidates = own if own and not tied else [n for n in names if n.endswith(EMBEDDINGS)]
    if len(candidates) != 1 or (not tied and not own):
        raise StageError(
            "trainer",
            f"teacher {teacher} ({model}): expected one head among its tensors, found "
            f"{', '.join(candidates) or 'none'}",
            "full_vocab needs safetensors with lm_head.weight or a tied embedding; else use "
            "loss.support teacher_topk or student_topk",
        )
    return candidates[0]


def _rows(file: Path, tensor: str, count: int) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(file, "pt") as tensors:
        rows: torch.Tensor = tensors.get_slice(tensor)[:count]
    return rows


def _scale(text: Any) -> float:
    scale = 1.0
    for key, power in FACTORS.items():
        value = getattr(text, key, None)
        if value is not None:
            scale *= float(value) ** power
    return scale
