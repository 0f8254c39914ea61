"""Models named by a hub id are replaced by local directories before their files are read.

Directories of the hub's local cache are traced back to the ids that they are copies of.
"""

from __future__ import annotations

import os.path
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import SelfTeacher, VllmTeacher
from async_opd.core.errors import ConfigError, Problem
from async_opd.files.absent import nearest
from async_opd.models.model_files import has_weights, is_hub_id

FILES = ["*.json", "*.safetensors", "*.jinja", "*.model", "*.txt"]
CODE = ["*.py"]
"""Downloaded only with models whose code is trusted."""
REQUIRED = ("config.json", "tokenizer.json", "tokenizer_config.json")
"""The files without which a cached model cannot be compared with others."""
COMMIT = re.compile(r"^[0-9a-f]{40}$")


@dataclass(frozen=True)
class NamedModel:
    """A model as the config names it; ``key`` is its section's key."""

    key: str
    model: str
    revision: str | None
    trusted: bool

    @property
    def is_hub_id(self) -> bool:
        """Whether the model would be downloaded."""
        return is_hub_id(self.model)

    def faults(self, where: str) -> list[Problem]:
        """Problems of the revision: given for a directory, or no commit for trusted code."""
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
        remedy = "40 digits from 0 to f: a branch or a tag may come to name other code"
        return [Problem(where, key, message, remedy)]


def named_models(config: RunConfig) -> list[NamedModel]:
    """The student and the teachers with a separate model."""
    own = config.student
    found = [NamedModel("student", own.model, own.revision, own.trust_remote_code)]
    for name, teacher in config.teachers.items():
        if isinstance(teacher, SelfTeacher) or teacher.model is None:
            continue
        trusted = isinstance(teacher, VllmTeacher) and teacher.trust_remote_code
        found.append(NamedModel(f"teachers.{name}", teacher.model, teacher.revision, trusted))
    return found


def naming_faults(config: RunConfig, where: str) -> list[Problem]:
    """Problems of the revisions of all models."""
    return [fault for named in named_models(config) for fault in named.faults(where)]


def without_code(config: RunConfig) -> RunConfig:
    """The config that does not trust the code of its student, which its image processor may be."""
    student = config.student.model_copy(update={"trust_remote_code": False})
    return config.model_copy(update={"student": student})


def localize(config: RunConfig, where: str) -> RunConfig:
    """The config with every hub id replaced by the directory of its (downloaded) files.

    The directory's name has the revision. ConfigError with every model that cannot be downloaded.
    """
    problems = naming_faults(config, where)
    if problems:
        raise ConfigError(problems)

    def download(named: NamedModel) -> str | None:
        from huggingface_hub import snapshot_download

        try:
            files = FILES + CODE if named.trusted else FILES
            return str(
                snapshot_download(named.model, revision=named.revision, allow_patterns=files)
            )
        except Exception as error:  # the hub's client raises many kinds for a failed download
            message = f"{named.model} is not a directory, and its download failed: {error}"
            remedy = "check the path, or the id and the revision"
            problems.append(Problem(where, f"{named.key}.model", message, remedy))
            return None

    localized = _replaced(config, download)
    if problems:
        raise ConfigError(problems)
    return localized


def with_cached(config: RunConfig, notes: list[str], where: str = "") -> tuple[RunConfig, set[str]]:
    """The config with cached hub ids replaced by their directories; keys of those without weights.

    A model whose weights are in the cache too is checked as a directory is. Downloads nothing.
    Every hub id adds a note, since it may be a mistyped path relative to the folder of ``where``.
    """
    folder = Path(where).resolve().parent
    keys: set[str] = set()

    def from_cache(named: NamedModel) -> str | None:
        directory = _cached(named)
        near = nearest(folder / named.model)
        near = f" ({near})" if near.startswith("did you mean") else ""
        note = f"{named.key}.model: {named.model} is not a local directory and is used as a hub id"
        note += f", for {folder} has none of this name{near}"
        if directory is None:
            notes.append(
                f"{note}; it is not in the local cache: the run can check only after the download "
                "whether it fits the other models and the prompts"
            )
        else:
            notes.append(f"{note}; its files in the local cache are checked")
            if not has_weights(Path(directory)):
                keys.add(f"{named.key}.model")
        return directory

    return _replaced(config, from_cache), keys


def _cached(named: NamedModel) -> str | None:
    """The directory of a hub id's cached files, if all of ``REQUIRED`` are there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        files = [
            try_to_load_from_cache(named.model, name, revision=named.revision) for name in REQUIRED
        ]
    except HFValidationError:
        return None
    if all(isinstance(file, str) and os.path.isfile(file) for file in files):
        return os.path.dirname(str(files[0]))
    return None


def _replaced(config: RunConfig, directory_of: Callable[[NamedModel], str | None]) -> RunConfig:
    """The config with each hub id replaced by its directory, unless ``directory_of`` gives None."""
    updates: dict[str, dict[str, str | None]] = {}
    for named in named_models(config):
        directory = directory_of(named) if named.is_hub_id else None
        if directory is not None:
            updates[named.key] = {"model": directory, "revision": None}
    teachers = {
        name: teacher.model_copy(update=updates.get(f"teachers.{name}", {}))
        for name, teacher in config.teachers.items()
    }
    student = config.student.model_copy(update=updates.get("student", {}))
    return config.model_copy(update={"student": student, "teachers": teachers})
