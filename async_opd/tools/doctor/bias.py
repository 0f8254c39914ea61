"""How far low precision moves a teacher, beside what the teacher is for.

P and L read the teacher's prompt, Q the student's.

the student's responses ──teacher, weights of its files──► P ──┬──► signal: KL(P ‖ Q)
         │  └─────────────teacher, as the run has it─────► L ──┴──► bias: KL(P ‖ L)
         └────────────────student────────────────────────► Q
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import VllmTeacher
from async_opd.core.errors import Problem
from async_opd.core.scores import TopK
from async_opd.models.model_files import ModelFiles
from async_opd.tools.doctor.divergences import Positions

REMEDY = "take the weights as in its files or a finer scheme, or raise"


@dataclass(frozen=True)
class PrecisionBias:
    """Means over ``tokens`` response positions, in nats: ``bias`` KL(P ‖ L), ``signal`` KL(P ‖ Q).

    P is the teacher with the weights of its files, L the same in the run's precision, Q the
    student. The responses are sampled from the student at temperature 1, as those of a run are, and
    the sums go over tokens by P. Both are lower bounds by top-k (see ``divergences``).
    ``share`` is bias / signal, whose denominator is the signal of the teacher of whole precision;
    None without a signal: this teacher is the student.
    """

    tokens: int
    bias: float
    signal: float
    share: float | None

    @classmethod
    def of(cls, whole: Sequence[TopK], low: Sequence[TopK], student: Sequence[TopK]) -> Self:
        """Of the scores of the same responses. ValueError for other lengths, or without a token."""
        both = list(zip(whole, low, student, strict=True))
        if not sum(len(one.ids) for one in whole):
            raise ValueError("no response has a token")
        moved = np.concatenate([Positions.of(own, other).forward for own, other, _ in both])
        taught = np.concatenate([Positions.of(own, other).forward for own, _, other in both])
        bias, signal = float(moved.mean()), float(taught.mean())
        return cls(len(moved), bias, signal, bias / signal if signal else None)

    def __str__(self) -> str:
        share = "there is no signal" if self.share is None else f"{self.share:.1%} of the signal"
        return (
            f"its precision has a bias of {self.bias:.2g} nats a token: {share} "
            f"KL(teacher ‖ student) {self.signal:.2g}, over {self.tokens} tokens"
        )

    def problem(self, where: str, name: str, most: float) -> Problem | None:
        """Refuses teacher ``name`` if its bias is more than ``most`` of the signal."""
        if self.bias <= most * self.signal:
            return None
        key = f"teachers.{name}.max_bias"
        return Problem(where, key, f"{self}; found {most:g}, more is refused", f"{REMEDY} {key}")


def unknown_bias(config: RunConfig, where: str, name: str) -> Problem | None:
    """The problem of teacher ``name`` whose own files are quantized: P is not there."""
    teacher = config.teachers[name]
    files = ModelFiles.read(teacher.model) if isinstance(teacher, VllmTeacher) else None
    if files is None or not files.quantized:
        return None
    message = (
        "the bias of its precision is unknown: its files are quantized; a bias that is shown is "
        "that of its engine's settings alone"
    )
    remedy = "name the model as it was before, with engine.quantization, to measure it"
    return Problem(where, f"teachers.{name}", message, remedy)
