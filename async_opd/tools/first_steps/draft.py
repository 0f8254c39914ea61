"""The keys of a first config: of flags, or of answers to questions at a terminal; and its YAML.

The comments of the file are the docstrings of its keys. Keys that many users change follow those
that are set, commented out, with their defaults.
"""

from __future__ import annotations

import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_opd.config.keys import default_of, keys_below, kinds_with, meaning_of
from async_opd.config.paths import HUB, hub_source_of
from async_opd.config.yaml_text import dump_yaml
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.printable import on_one_line

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

    def words(self) -> list[str]:
        """The arguments as words of a command line."""
        student = [] if self.student is None else [self.student]
        given = {"student": student, "teacher": self.teachers}
        given |= {"data": self.train, "eval": self.eval}
        return [f"--{flag}={one}" for flag, values in given.items() for one in values]

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


WIDTH = 100
SET: tuple[str, ...] = (
    *("rollout.max_tokens", "loss.kind", "train.steps", "train.lr"),
    *("async.staleness_threshold", "eval.every", "checkpoint.every"),
)
"""Keys that are written with their defaults where nothing else was given."""
TUNED: tuple[str, ...] = (
    *("rollout.n", "rollout.replicas", "rollout.temperature", "loss.top_k"),
    *("train.batch_size", "train.warmup_steps", "async.sync_steps"),
    *("eval.grader", "eval.max_prompts", "checkpoint.keep"),
)
"""Keys that are written commented out."""
HEAD = """\
# Written by `async_opd init`. Keys behind "# " have their defaults; docs/config.md has all keys.
#   async_opd doctor {file}     would it work here, and what do the models read?
#   async_opd run {file}        trains
"""


def completed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The keys, and those of ``SET`` with their defaults, sections in the config's order."""
    filled = {
        name: dict(value) if isinstance(value, dict) else value for name, value in tree.items()
    }
    for key in SET:
        section, _, name = key.partition(".")
        if section == "eval" and "eval" not in tree["data"]:
            continue
        filled.setdefault(section, {})
        if isinstance(filled[section], dict):
            filled[section].setdefault(name, default_of(key))
    order = keys_below("")
    return dict(sorted(filled.items(), key=lambda item: order.index(item[0])))


def config_text(tree: Mapping[str, Any], file: str) -> str:
    """The YAML of a config that is called ``file``, one key a line, each with its meaning."""
    lines = [line for key, value in tree.items() for line in _lines("", key, value)]
    return HEAD.format(file=on_one_line(file)) + "".join(f"{line}\n" for line in lines)


def _lines(section: str, name: str, value: Any) -> Iterator[str]:
    """The lines of a key: a section's keys are below it, and then those that are commented out."""
    key = f"{section}.{name}".lstrip(".")
    indent = "  " * key.count(".")
    if not isinstance(value, dict) or not keys_below(key):
        yield from _with_comment(_yaml(name, value), meaning_of(key), indent)
        return
    yield from _with_comment([f"{_yaml(name, 0)[0].removesuffix(' 0')}"], meaning_of(key), indent)
    for inner, one in value.items():
        yield from _lines(key, inner, one)
    for hint in _hints(key, value):
        text = _yaml(hint.rpartition(".")[2], default_of(hint))
        yield from _with_comment([f"# {line}" for line in text], meaning_of(hint), f"{indent}  ")


def _hints(section: str, given: Mapping[str, Any]) -> Iterator[str]:
    """The keys of ``TUNED`` in a section that are not given, and that its kind has."""
    for hint in TUNED:
        parent, _, name = hint.rpartition(".")
        kinds = kinds_with(section, name)
        is_valid = not kinds or given.get("kind") in kinds
        if parent == section and name not in given and is_valid:
            yield hint


def _yaml(name: str, value: Any) -> list[str]:
    flow = None if isinstance(value, dict | list) else False
    return dump_yaml({name: value}, flow=flow).rstrip("\n").splitlines()


def _with_comment(lines: list[str], comment: str, indent: str) -> list[str]:
    """The lines, with the comment behind the first where there is room, else in lines above."""
    first, *rest = [indent + line for line in lines]
    behind = f"{first}  # {comment}" if comment else first
    if len(behind) <= WIDTH:
        return [behind, *rest]
    above = textwrap.wrap(
        comment, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# "
    )
    return [*above, first, *rest]
