"""Models named by a hub id become local directories before anything looks at them."""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from dataclasses import dataclass

from async_opd.config.run_config import RunConfig, SelfTeacher, VllmTeacher
from async_opd.core.errors import ConfigError, Problem
from async_opd.models.model_files import is_hub_id

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
CODE = ["*.py"]
"""Downloaded only with models whose code is trusted."""
LEAST = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""Without these, nothing of a model can be compared."""
COMMIT = re.compile(r"^[0-9a-f]{40}$")


@dataclass(frozen=True)
class NamedModel:
    """A model as the config names it; ``key`` is that of its section."""

    key: str
    model: str
    revision: str | None
    trusted: bool

    @property
    def is_hub_id(self) -> bool:
        """Whether it would be downloaded."""
        return is_hub_id(self.model)

    def faults(self, where: str) -> list[Problem]:
        """What is wrong with how it is named."""
        key = f"{self.key}.revision"
        if not self.is_hub_id:
            message = f"found {self.revision!r}, but {self.model} is a directory, which has none"
            remedy = "remove it, or name the model by its hub id"
            return [] if self.revision is None else [Problem(where, key, message, remedy)]
        if not self.trusted or COMMIT.match(self.revision or ""):
            return []
        message = (
            f"found {self.revision!r}, expected the commit of {self.model} whose code you have read"
        )
        remedy = "40 digits from 0 to f: a branch or a tag may become another one's code"
        return [Problem(where, key, message, remedy)]


def named_models(config: RunConfig) -> list[NamedModel]:
    """The student and the teachers with a model of their own."""
    own = config.student
    found = [NamedModel("student", own.model, own.revision, own.trust_remote_code)]
    for name, teacher in config.teachers.items():
        if isinstance(teacher, SelfTeacher) or teacher.model is None:
            continue
        trusted = isinstance(teacher, VllmTeacher) and teacher.trust_remote_code
        found.append(NamedModel(f"teachers.{name}", teacher.model, teacher.revision, trusted))
    return found


def naming_faults(config: RunConfig, where: str) -> list[Problem]:
    """What is wrong with how models are named."""
    return [fault for named in named_models(config) for fault in named.faults(where)]


def localize(config: RunConfig, where: str) -> RunConfig:
    """The config with every hub id replaced by the directory of its (downloaded) files.

    Its revision is part of that directory's name then. Raises ConfigError for all that cannot be
    had.
    """
    problems = naming_faults(config, where)
    if problems:
        raise ConfigError(problems)

    def local(named: NamedModel) -> str | None:
        from huggingface_hub import snapshot_download

        try:
            files = FILES + CODE if named.trusted else FILES
            return str(
                snapshot_download(named.model, revision=named.revision, allow_patterns=files)
            )
        except Exception as error:  # the hub's client raises many kinds; all mean: not to be had
            message = f"{named.model} is no directory and cannot be had from the hub: {error}"
            remedy = "check the path, or the id and the revision"
            problems.append(Problem(where, f"{named.key}.model", message, remedy))
            return None

    found = _replaced(config, local)
    if problems:
        raise ConfigError(problems)
    return found


def with_cached(config: RunConfig, notes: list[str]) -> tuple[RunConfig, set[str]]:
    """The config with hub ids replaced by what of them was downloaded before, and their keys.

    Downloads nothing; what is taken for a hub id is a note.
    """
    keys: set[str] = set()

    def local(named: NamedModel) -> str | None:
        directory = _cached(named)
        said = f"{named.key}.model: {named.model} is no directory and is taken for a hub id"
        if directory is None:
            notes.append(
                f"{said}; it is not in the local cache: whether it fits the other models and the "
                "prompts is only found when the run has downloaded it"
            )
        else:
            notes.append(f"{said}; its files in the local cache are what is checked")
            keys.add(f"{named.key}.model")
        return directory

    return _replaced(config, local), keys


def _cached(named: NamedModel) -> str | None:
    """The directory of an id's files, if at least its configuration and tokenizer are there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [
            try_to_load_from_cache(named.model, name, revision=named.revision) for name in LEAST
        ]
    except HFValidationError:
        return None
    if all(isinstance(file, str) and os.path.isfile(file) for file in found):
        return os.path.dirname(str(found[0]))
    return None


def _replaced(config: RunConfig, local: Callable[[NamedModel], str | None]) -> RunConfig:
    """``local`` turns a hub id into its directory, or into None where it stays."""
    found: dict[str, dict[str, str | None]] = {}
    for named in named_models(config):
        directory = local(named) if named.is_hub_id else None
        if directory is not None:
            found[named.key] = {"model": directory, "revision": None}
    teachers = {
        name: teacher.model_copy(update=found.get(f"teachers.{name}", {}))
        for name, teacher in config.teachers.items()
    }
    student = config.student.model_copy(update=found.get("student", {}))
    return config.model_copy(update={"student": student, "teachers": teachers})
