"""Models named by a hub id become local directories before anything looks at them."""

from __future__ import annotations

import os.path

from async_opd.core.config import RunConfig, SelfTeacher, VllmTeacher
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.model_files import HUB_ID

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
CODE = ["*.py"]
"""Downloaded only with models whose code is trusted."""


def localize(config: RunConfig, where: str) -> RunConfig:
    """The config with every hub id replaced by the directory of its (downloaded) files.

    Raises ConfigError for all that cannot be had.
    """
    problems: list[Problem] = []

    def local(key: str, model: str, trusted: bool) -> str:
        if os.path.isdir(model) or not HUB_ID.match(model):
            return model
        from huggingface_hub import snapshot_download

        try:
            patterns = FILES + CODE if trusted else FILES
            return str(snapshot_download(model, allow_patterns=patterns))
        except Exception as error:  # the hub's client raises many kinds; all mean: not to be had
            message = f"{model} is no directory and cannot be had from the hub: {error}"
            problems.append(Problem(where, key, message, "check the path or the id"))
            return model

    own = config.student
    model = local("student.model", own.model, own.trust_remote_code)
    student = own.model_copy(update={"model": model})
    teachers = {}
    for name, teacher in config.teachers.items():
        if isinstance(teacher, SelfTeacher) or teacher.model is None:
            continue
        trusted = isinstance(teacher, VllmTeacher) and teacher.trust_remote_code
        model = local(f"teachers.{name}.model", teacher.model, trusted)
        teachers[name] = teacher.model_copy(update={"model": model})
    if problems:
        raise ConfigError(problems)
    return config.model_copy(update={"student": student, "teachers": config.teachers | teachers})
