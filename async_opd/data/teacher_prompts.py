"""The prompts of teachers in place of the student's, and where the two differ.

row ──prompt_template──► text or messages ──chat template──► token ids
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from async_opd.config.run_config import RunConfig
from async_opd.core.row import Row, images_of
from async_opd.data.prompts import filled
from async_opd.models.model_files import is_hub_id
from async_opd.models.tokenizer import Text

Reader = Callable[[Row], list[int]]
"""The token ids of a row's prompt."""
STUDENT = "student"


def teacher_readers(config: RunConfig, text: Text) -> dict[str, Reader]:
    """How those teachers read prompts that read others than the student, by name.

    ``text`` is the student's. A teacher whose own template is on the hub is left out: in a run all
    models are local. ValueError where a prompt cannot end as the student's does.
    """
    readers: dict[str, Reader] = {}
    for name, teacher in config.teachers.items():
        model = config.template_model(name) if teacher.own_template else None
        if model is not None and is_hub_id(model):
            continue
        own = text.of_teacher(config, name)
        if own is not text or teacher.prompt_template is not None:
            readers[name] = partial(_read, own, teacher.prompt_template)
    return readers


def _read(text: Text, template: str | None, row: Row) -> list[int]:
    prompt = row.prompt if template is None else filled(template, row)
    shown, own = list(images_of(prompt)), [image.sha256 for image in row.images]
    if shown != own:
        raise ValueError(
            f"the teacher's prompt shows {len(shown)} images, not the row's {len(own)} in order"
        )
    return text.encode(prompt)


@dataclass(frozen=True)
class TeacherPrompt:
    """A row's prompt as the student or a teacher reads it; ``pieces`` are its tokens' texts."""

    reader: str
    ids: tuple[int, ...]
    pieces: tuple[str, ...]


@dataclass(frozen=True)
class Difference:
    """Two prompts that differ, from token ``at`` on; their last ``end`` tokens are equal.

    ``student`` and ``teacher`` are the texts of the tokens there; None beyond a prompt's end.
    """

    at: int
    student: str | None
    teacher: str | None
    end: int


def prompts_as_read(config: RunConfig, text: Text, row: Row) -> list[TeacherPrompt]:
    """The row's prompt as the student reads it, and then as its teacher does, if it has one.

    Raises what encoding a prompt raises.
    """
    readers: dict[str, Reader] = {STUDENT: partial(_read, text, None)}
    name = config.teacher_of(row.data_source)
    if name is not None:
        readers[name] = teacher_readers(config, text).get(name, readers[STUDENT])
    found = {reader: read(row) for reader, read in readers.items()}
    return [TeacherPrompt(one, tuple(ids), tuple(text.pieces(ids))) for one, ids in found.items()]


def first_difference(student: TeacherPrompt, teacher: TeacherPrompt) -> Difference | None:
    """Where the teacher's prompt differs from the student's, token by token; None: nowhere."""
    if student.ids == teacher.ids:
        return None
    at = _equal(student.ids, teacher.ids)
    end = _equal(student.ids[at:][::-1], teacher.ids[at:][::-1])
    own, other = (next(iter(one.pieces[at:]), None) for one in (student, teacher))
    return Difference(at, own, other, end)


def _equal(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """The number of equal tokens from the first on."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
