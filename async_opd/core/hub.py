"""Models named by a hub id become local directories before anything looks at them."""

from __future__ import annotations

import os.path

from async_opd.core.config import RunConfig, SelfTeacher
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.model_files import HUB_ID

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]


def localize(config: RunConfig, where: str) -> RunConfig:
    """The config with every hub id replaced by the directory of its (downloaded) files.

    Raises ConfigError for all that cannot be had.
    """
    problems: list[Problem] = []

    def local(key: str, model: str) -> str:
        if os.path.isdir(model) or not HUB_ID.match(model):
            return model
        from huggingface_hub import snapshot_download

        try:
            return str(snapshot_download(model, allow_patterns=FILES))
        except Exception as error:  # the hub's client raises many kinds; all mean: not to be had
            message = f"{model} is no directory and cannot be had from the hub: {error}"
            problems.append(Problem(where, key, message, "check the path or the id"))
            return model

    student = config.student.model_copy(
        update={"model": local("student.model", config.student.model)}
    )
    teachers = {
        name: teacher.model_copy(update={"model": local(f"teachers.{name}.model", teacher.model)})
        for name, teacher in config.teachers.items()
        if not isinstance(teacher, SelfTeacher) and teacher.model is not None
    }
    if problems:
        raise ConfigError(problems)
    return config.model_copy(update={"student": student, "teachers": config.teachers | teachers})
