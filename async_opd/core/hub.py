"""Models named by a hub id become local directories before anything looks at them."""

from __future__ import annotations

import os.path
from collections.abc import Callable

from async_opd.core.config import RunConfig, SelfTeacher, VllmTeacher
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.model_files import HUB_ID

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
CODE = ["*.py"]
"""Downloaded only with models whose code is trusted."""
LEAST = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""Without these, nothing of a model can be compared."""


def localize(config: RunConfig, where: str) -> RunConfig:
    """The config with every hub id replaced by the directory of its (downloaded) files.

    Raises ConfigError for all that cannot be had.
    """
    problems: list[Problem] = []

    def local(key: str, model: str, trusted: bool) -> str:
        from huggingface_hub import snapshot_download

        try:
            patterns = FILES + CODE if trusted else FILES
            return str(snapshot_download(model, allow_patterns=patterns))
        except Exception as error:  # the hub's client raises many kinds; all mean: not to be had
            message = f"{model} is no directory and cannot be had from the hub: {error}"
            problems.append(Problem(where, key, message, "check the path or the id"))
            return model

    found = _replaced(config, local)
    if problems:
        raise ConfigError(problems)
    return found


def with_cached(config: RunConfig, notes: list[str]) -> tuple[RunConfig, set[str]]:
    """The config with hub ids replaced by what of them was downloaded before, and their keys.

    Downloads nothing; what is not there is a note.
    """
    keys: set[str] = set()

    def local(key: str, model: str, trusted: bool) -> str:
        directory = _cached(model)
        if directory is None:
            notes.append(
                f"{key}: {model} is a hub id, and not in the local cache: whether it fits the "
                "other models and the prompts is only found when the run has downloaded it"
            )
            return model
        keys.add(key)
        return directory

    return _replaced(config, local), keys


def _cached(model: str) -> str | None:
    """The directory of an id's files, if at least its configuration and tokenizer are there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(model, name) for name in LEAST]
    except HFValidationError:
        return None
    if all(isinstance(file, str) and os.path.isfile(file) for file in found):
        return os.path.dirname(str(found[0]))
    return None


def _replaced(config: RunConfig, local: Callable[[str, str, bool], str]) -> RunConfig:
    """``local`` turns a hub id, of which it gets the key and whether its code is trusted."""

    def replaced(key: str, model: str, trusted: bool) -> str:
        here = os.path.isdir(model) or not HUB_ID.match(model)
        return model if here else local(key, model, trusted)

    own = config.student
    model = replaced("student.model", own.model, own.trust_remote_code)
    student = own.model_copy(update={"model": model})
    teachers = {}
    for name, teacher in config.teachers.items():
        if isinstance(teacher, SelfTeacher) or teacher.model is None:
            continue
        trusted = isinstance(teacher, VllmTeacher) and teacher.trust_remote_code
        model = replaced(f"teachers.{name}.model", teacher.model, trusted)
        teachers[name] = teacher.model_copy(update={"model": model})
    return config.model_copy(update={"student": student, "teachers": config.teachers | teachers})
