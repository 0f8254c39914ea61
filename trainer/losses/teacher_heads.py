"""The teachers' heads, which turn the hidden states that a teacher sends into its logits.

    model directory ──safetensors, one tensor──► head's weight [V, H] ──× states──► logits

Only the head is read from a model, and of it only the rows that the student has too. Teachers with
the same model share one weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from async_opd.core.errors import StageError
from async_opd.models.lm_head import HeadFiles, LogitShape, TensorPlace
from async_opd.models.model_files import ModelError
from trainer.losses.chunked import PLAIN, project, shape_logits

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from async_opd.config.sections.teachers import EngineTeacher


@dataclass(frozen=True)
class TeacherHead:
    """Logits of hidden states h: W h + b, shaped as the model does, divided by the temperature."""

    name: str
    weight: torch.Tensor
    bias: torch.Tensor | None = None
    shape: LogitShape = PLAIN
    temperature: float = 1.0

    @property
    def vocabulary(self) -> int:
        """Number of rows of the weight."""
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
        scale = self.shape.scale / self.temperature
        return shape_logits(logits, replace(self.shape, scale=scale))


def load_heads(config: RunConfig, vocabulary: int, device: torch.device) -> dict[str, TeacherHead]:
    """The head of every teacher, by its name; none where the objective needs none.

    ``vocabulary`` is the student's. StageError for a model whose head cannot be read.
    """
    from async_opd.config.sections.loss import score_kind
    from async_opd.config.sections.teachers import EngineTeacher

    if score_kind(config.loss) != "hidden":
        return {}
    heads: dict[str, TeacherHead] = {}
    of_model: dict[tuple[str, torch.dtype], TeacherHead] = {}
    for name, teacher in config.teachers.items():
        if not isinstance(teacher, EngineTeacher):
            remedy = "use a teacher with a model, or a loss.support other than full_vocab"
            cause = f"teacher {name} is a server, and returns no hidden states"
            raise StageError("trainer", cause, remedy)
        key = (config.teacher_model(name), _dtype(teacher, device))
        if key not in of_model:
            of_model[key] = read_head(name, *key, vocabulary, device)
        heads[name] = replace(of_model[key], name=name, temperature=teacher.temperature)
    return heads


def _dtype(teacher: EngineTeacher, device: torch.device) -> torch.dtype:
    """The engine's dtype: its states have it, and the head rounds as the engine's does."""
    name = teacher.engine.dtype
    if name == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]


def read_head(
    name: str, model: str, dtype: torch.dtype, vocabulary: int, device: torch.device
) -> TeacherHead:
    """Reads the head from a model directory. StageError for a model whose head cannot be read."""
    try:
        files = HeadFiles.read(model)
    except ModelError as error:
        raise StageError("trainer", f"teacher {name}: {error.message}", error.remedy) from error

    def read(place: TensorPlace) -> torch.Tensor:
        with safe_open(place.file, "pt") as tensors:
            rows: torch.Tensor = tensors.get_slice(place.name)[:vocabulary]
        return rows.to(device=device, dtype=dtype)

    bias = None if files.bias is None else read(files.bias)
    return TeacherHead(name, read(files.weight), bias, files.shape)
