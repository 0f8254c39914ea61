"""The prompts of a probe: of each source, as its student and its teacher read them.

rows of data.train (of data.eval, if only these can be graded) ──by seed──► prompts ──► Asked
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import numpy as np

from async_opd.checks.preflight import Inputs
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.environment import ENVIRONMENT
from async_opd.config.user_code import GRADER_GROUP, names_user_code
from async_opd.core.errors import RolloutFault
from async_opd.core.row import Row
from async_opd.core.samples import Prompt
from async_opd.core.stages import SamplingSpec
from async_opd.data.prompts import to_prompt
from async_opd.data.teacher_prompts import Reader, teacher_readers
from async_opd.grading.evaluation import Evaluation
from async_opd.grading.evaluation_set import evaluation_of
from async_opd.grading.graders import has_verifier
from async_opd.models.hub import named_models
from async_opd.models.model_files import ModelFiles
from async_opd.models.tokenizer import Text
from async_opd.tools.doctor.prompts import sampled
from async_opd.tools.doctor.templates import has_unused_template
from async_opd.tools.probe.measuring import (
    Asked,
)

RESPONSE_TOKENS = 1024
"""Most tokens of a sampled response: gaps are known well before."""
SPARE = 2
"""Rows that are looked at for each prompt: some prompts do not fit."""


@dataclass(frozen=True)
class AskedSource:
    """A data source, its teacher's name, and what both models are asked."""

    source: str
    teacher: str
    asked: Asked
    evaluation: Evaluation
    """Its ``close`` ends the grader's processes."""


def asked_sources(
    config: RunConfig, inputs: Inputs, text: Text, count: int, folder: Path
) -> list[AskedSource]:
    """At most ``count`` prompts of each source that has a teacher and a prompt that fits."""
    made, readers = list[AskedSource](), teacher_readers(config, text)
    every = config.eval.model_copy(update={"max_prompts": None})
    whole = config.model_copy(update={"eval": every})
    trained, evaluated = (_by_source(part) for part in (inputs.checked, inputs.eval))
    played = config.environment is not None  # episodes read no prompt that was rendered before
    others = {} if played else _other_readers(config, text)
    for source, rows in sorted(trained.items()):
        teacher = config.teacher_of(source)
        graded = _can_be_graded(config, rows)
        if not graded and _can_be_graded(config, evaluated.get(source, [])):
            rows, graded = evaluated[source], True
        some = sampled(config, [rows], SPARE * count)
        chosen = [row for row in some if _fits(config, inputs, text, readers, row)][:count]
        evaluation = evaluation_of(whole, [chosen], text, folder, readers)
        if teacher is None or evaluation is None:
            continue
        asked = Asked(
            evaluation.prompts,
            evaluation.sampling,
            SamplingSpec(min(config.rollout.max_tokens, RESPONSE_TOKENS), 1.0, 1.0, 1),
            evaluation.grade if graded else None,
            _rendered(evaluation.prompts, chosen, others.get(teacher)),
        )
        made.append(AskedSource(source, teacher, asked, evaluation))
    return made


def _by_source(parts: Sequence[Sequence[Row]]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in chain.from_iterable(parts):
        found.setdefault(row.data_source, []).append(row)
    return found


def _can_be_graded(config: RunConfig, rows: Sequence[Row]) -> bool:
    """Whether some row has an answer or a verifier; a user's code may need neither."""
    grader = config.eval.grader
    if rows and (grader == ENVIRONMENT or names_user_code(grader, GRADER_GROUP)):
        return True
    return any(row.answer is not None or has_verifier(row) for row in rows)


def _fits(
    config: RunConfig, inputs: Inputs, text: Text, readers: dict[str, Reader], row: Row
) -> bool:
    """Whether the prompt can be made, and is not longer than a run takes."""
    limit = inputs.max_prompt_tokens
    try:
        to_prompt(
            row,
            text.encode,
            config.teacher_of,
            limit=limit,
            readers=readers,
            sized=text.image_tokens,
        )
    except RolloutFault:
        return False
    return True


def _other_readers(config: RunConfig, text: Text) -> dict[str, Reader]:
    """For teachers with a separate template that the run does not use: how it reads rows."""
    named = ((one.key, ModelFiles.read(one.model, weights=False)) for one in named_models(config))
    files = {f"{key}.model": read for key, read in named if read is not None}
    found: dict[str, Reader] = {}
    for name, teacher in config.teachers.items():
        if has_unused_template(config, files, name):
            own = {**config.teachers, name: teacher.model_copy(update={"own_template": True})}
            with suppress(ValueError):  # it cannot end as the student's does: no run can use it
                readers = teacher_readers(config.model_copy(update={"teachers": own}), text)
                found |= {name: readers[name]} if name in readers else {}
    return found


def _rendered(
    prompts: Sequence[Prompt], rows: Sequence[Row], reader: Reader | None
) -> list[Prompt] | None:
    """The prompts as the teacher's own template renders them.

    None if it has none, if these are the run's, or if the template refuses one, as the doctor says.
    """
    if reader is None:
        return None
    try:
        ids = [np.array(reader(row), np.int32) for row in rows]
    except Exception:  # a chat template can raise anything
        return None
    seen = (prompt.for_teacher.token_ids for prompt in prompts)
    if all(np.array_equal(one, other) for one, other in zip(seen, ids, strict=True)):
        return None
    return [replace(prompt, teacher_ids=own) for prompt, own in zip(prompts, ids, strict=True)]
