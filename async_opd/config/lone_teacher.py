"""Configs of a single teacher, whose engines are started alone: to compare it, or to ask it."""

from __future__ import annotations

from collections.abc import Collection

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EndpointTeacher, SelfTeacher, VllmTeacher

ITSELF = "student"
"""The name of the teacher that is the student itself."""


def with_one_teacher(config: RunConfig, name: str) -> RunConfig:
    """The config with this teacher, on dedicated GPUs: no other pool is there."""
    teacher = config.teachers[name]
    own = {} if isinstance(teacher, EndpointTeacher) else {"placement": "dedicated", "with_": None}
    return config.model_copy(update={"teachers": {name: teacher.model_copy(update=own)}})


def with_whole_teacher(config: RunConfig, name: str) -> RunConfig | None:
    """``with_one_teacher`` in the precision of its files; None if the run has it in that already.

    None for other kinds than ``vllm``, too: servers have a precision that is not known, and the
    student itself teaches nothing at first.
    """
    alone = with_one_teacher(config, name)
    teacher = alone.teachers[name]
    if not isinstance(teacher, VllmTeacher) or not teacher.engine.low_precision:
        return None
    whole = teacher.model_copy(update={"engine": teacher.engine.whole, "replicas": 1})
    return alone.model_copy(update={"teachers": {name: whole}})


def with_itself_as_teacher(config: RunConfig, shown: Collection[str] = ()) -> RunConfig:
    """The config with the student as the only teacher, in a whole engine like its teachers'.

    That is the first teacher's that has engines, if possible one of the data sources ``shown``,
    whose prompts have images: another's may have no room for them.
    """
    vision = {config.teacher_of(source) for source in shown}
    engines = {
        name: one.engine
        for name, one in config.teachers.items()
        if not isinstance(one, EndpointTeacher)
    }
    first = sorted(engines, key=lambda name: name not in vision)[:1]
    settings = engines[first[0]] if first else config.rollout.engine
    itself = SelfTeacher(kind="self", sources=[ITSELF], engine=settings.whole)
    return config.model_copy(update={"teachers": {ITSELF: itself}})
