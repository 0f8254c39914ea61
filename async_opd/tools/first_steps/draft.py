"""The keys of a first config: of flags, or of answers to questions at a terminal."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_opd.config.paths import HUB, hub_source_of
from async_opd.core.errors import ConfigError, Problem

COMMAND_LINE = "command line"
LONE = "teacher"
"""The name of a teacher that was given without one."""
NAMED = re.compile(r"(?P<name>[\w.-]+)(?::(?P<teacher>[\w.-]+))?=(?P<path>.+)", re.DOTALL)
Ask = Callable[[str, str], str]
"""Asks a question; its second argument is the answer to an empty line."""


@dataclass
class Draft:
    """The user's arguments; texts as on the command line, ``[name=]path`` and the like."""

    student: str | None = None
    teachers: list[str] = field(default_factory=list)
    train: list[str] = field(default_factory=list)
    eval: list[str] = field(default_factory=list)

    def ask(self, ask: Ask) -> None:
        """Asks for what is missing; one empty line ends a list."""
        where = "directory or hub id"
        self.student = self.student or ask(f"Student model ({where})", "")
        if not self.teachers:
            self.teachers = _several(ask, f"Teacher ({where}, with several: NAME=…)")
        if not self.train:
            form = "file, directory or hf:ID, or SOURCE[:TEACHER]=…"
            self.train = _several(ask, f"Training prompts ({form})")
            self.eval = self.eval or _several(ask, "Evaluation prompts, with answers (the same)")

    def tree(self, name: str, folder: Path) -> dict[str, Any]:
        """The keys of a config of this name in ``folder``. ConfigError with all that is missing."""
        given = {"student": self.student, "teacher": self.teachers, "data": self.train}
        problems = [
            Problem(COMMAND_LINE, f"--{flag}", "is missing", f"add --{flag} {_EXAMPLES[flag]}")
            for flag, value in given.items()
            if not value
        ]
        models = self._teachers(problems)
        sources = {part: [_source(text) for text in getattr(self, part)] for part in _PARTS}
        given_to = [one for part in sources.values() for one in part]
        unknown = [one for one in given_to if one.teacher not in (None, *models)]
        problems += [_unknown(source, models) for source in unknown]
        if problems:
            raise ConfigError(problems)
        teachers = {
            teacher: {"model": _from(folder, model)} | _served(teacher, given_to)
            for teacher, model in models.items()
        }
        data = {part: [one.entry(folder) for one in found] for part, found in sources.items()}
        return {
            "name": name,
            "student": {"model": _from(folder, str(self.student))},
            "teachers": teachers,
            "data": {part: entries for part, entries in data.items() if entries},
        }

    def _teachers(self, problems: list[Problem]) -> dict[str, str]:
        """The models by name of the teacher; a name that is given twice is a problem."""
        found: dict[str, str] = {}
        for text in self.teachers:
            named = NAMED.fullmatch(text)
            name = LONE if named is None else named["name"]
            if name in found:
                message = f"there are two teachers {name}: {found[name]} and {text}"
                remedy = "give each a name: --teacher math=PATH --teacher code=PATH"
                problems.append(Problem(COMMAND_LINE, "--teacher", message, remedy))
            found[name] = text if named is None else named["path"]
        return found


_PARTS = ("train", "eval")
_EXAMPLES = {
    "student": "models/student",
    "teacher": "math=models/math-teacher",
    "data": "data/train.jsonl",
}


@dataclass(frozen=True)
class _Source:
    """A source of prompts; without ``name`` each row has the name of its data source."""

    path: str
    name: str = ""
    teacher: str | None = None

    def entry(self, folder: Path) -> str | dict[str, str]:
        """Its entry of the config's lists of sources."""
        path = self.path
        if not path.startswith(HUB):
            found = _from(folder, path)
            return {"path": found, "data_source": self.name} if self.name else found
        named = _from(folder, path.removeprefix(HUB))
        text = named if named == path.removeprefix(HUB) else f"./{named}"
        return {**hub_source_of(text), "data_source": self.name} if self.name else HUB + text


def _source(text: str) -> _Source:
    named = NAMED.fullmatch(text)
    return _Source(text) if named is None else _Source(named["path"], named["name"], named[2])


def _served(teacher: str, sources: list[_Source]) -> dict[str, list[str]]:
    """The key ``sources`` of a teacher, if sources of prompts name it.

    Rows that have a name, and sources of the teacher's name, remain the teacher's.
    """
    named = {source.name for source in sources if source.teacher == teacher}
    own = {teacher for one in sources if one.teacher is None and one.name in ("", teacher)}
    return {"sources": sorted(named | own)} if named else {}


def _unknown(source: _Source, models: dict[str, str]) -> Problem:
    message = f"{source.name}:{source.teacher} names a teacher that is not given"
    known = ", ".join(models) or "none"
    return Problem(COMMAND_LINE, "--data", message, f"name one of --teacher ({known})")


def _from(folder: Path, text: str) -> str:
    """A path of the working directory as the config in ``folder`` names it; other texts stay."""
    if os.path.isabs(text) or not os.path.exists(text):
        return text
    return os.path.relpath(text, folder)


def _several(ask: Ask, question: str) -> list[str]:
    """Answers until one is empty."""
    answers: list[str] = []
    while answer := ask(question if not answers else "  another one, or nothing", ""):
        answers.append(answer)
    return answers
