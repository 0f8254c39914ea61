"""Loads a YAML file and ``key=value`` overrides into a RunConfig, or reports all problems at once.

defaults  <  YAML  <  command line
"""

from __future__ import annotations

import copy
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal, Protocol

from pydantic import ValidationError

from async_opd.config.foreign_keys import GPU_COUNTS, GPUS, name_here
from async_opd.config.keys import (
    MAX_SUGGESTED,
    default_of,
    drop_removed,
    key_of,
    keys_below,
    kinds_with,
    meaning_of,
    nearest,
    nearest_key,
    new_name,
    why_removed,
)
from async_opd.config.paths import resolve_paths
from async_opd.config.run_config import RunConfig, SizesError
from async_opd.config.secrets import HIDDEN, Redactor, names_secret, take_out
from async_opd.config.sections.loss import K1_MESSAGE, K1_REMEDY, supervised_k1, without_request
from async_opd.config.sections.section import CHECK_NAMES
from async_opd.config.yaml_text import YamlError, dump_yaml, load_yaml
from async_opd.core.errors import ConfigError, Problem
from async_opd.core.nesting import MAX_DEPTH, too_deep
from async_opd.files.absent import nearest as nearest_path

COMMAND_LINE = "command line"
UNEXAMINED = "models and data are not examined yet: they may have problems, too"
MAX_SHOWN_CHARACTERS = 200

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 80
_shown = _short.repr

NO_SECTION = ("model_type", "model_attributes_type", "dict_type")
"""Errors of pydantic for a value in the place of keys and values."""
FOR_ANCHORS = "x-"
"""Begins top-level keys that are ignored: they hold values which other keys refer to."""

MAX_CONFIG_BYTES = 1 << 20
"""Bound of a config file's size, in bytes."""


class Readable(Protocol):
    """A file by its path, or a ``ForeignPath``."""

    def open(self, mode: Literal["rb"], /) -> IO[bytes]:
        """As ``Path.open``."""


def load_config(
    path: str | Readable | Mapping[str, Any],
    overrides: Sequence[str] = (),
    folder: Path | None = None,
    recorded: bool = False,
) -> RunConfig:
    """Reads a config, applies overrides, validates. Raises ConfigError with all problems.

    A mapping is the content of a file in ``folder``, by default the working directory.
    Relative paths of models, data and graders, in the file or in overrides, are relative to the
    file's folder; ``run_dir`` stays relative to the working directory. A ``recorded`` config,
    that of a run directory, reads no environment variable, its names may have any characters, and
    keys of it that were removed since are ignored. So are top-level keys that begin with ``x-``,
    whose values may have anchors.
    """
    source = _prepared(path, overrides, folder, recorded, without_removed=recorded)
    found = _validated(source)
    if source.problems or not isinstance(found, RunConfig):
        raise ConfigError(_without_secrets(source), "" if recorded else UNEXAMINED)
    return found


def load_recorded_config(
    path: str | Readable, overrides: Sequence[str] = ()
) -> tuple[RunConfig, list[Problem]]:
    """The config of a run that an older version may have made, and what of it is left out.

    A key that this version does not know, or whose value it does not take, has its default. Faults
    of whole sections, of keys that do not go together, and of overrides raise ConfigError.
    """
    source = _prepared(path, overrides, recorded=True)
    left_out: list[Problem] = []
    while not source.problems:
        found = _validated(source)
        if isinstance(found, RunConfig):
            return found, left_out
        left_out += _without_secrets(source)
        if all(source.leave_out(entry) for entry in found):
            source.problems = []
    raise ConfigError(_without_secrets(source))


def with_overrides(tree: Mapping[str, Any], overrides: Sequence[str]) -> dict[Any, Any]:
    """A config's content with overrides. ConfigError for text that is not an override."""
    source = _Source(COMMAND_LINE, _copied(tree))
    for override in overrides:
        source.override(override)
    if source.problems:
        raise ConfigError(_without_secrets(source))
    return source.tree


def _prepared(
    path: str | Readable | Mapping[str, Any],
    overrides: Sequence[str],
    folder: Path | None = None,
    recorded: bool = False,
    without_removed: bool = False,
) -> _Source:
    """The file with its overrides, before it is validated. ConfigError if it cannot be read.

    ``without_removed``: keys of earlier versions are ignored, whatever their values are.
    """
    if isinstance(path, Mapping):
        source = _Source("the config", _copied(path), recorded)
    else:
        tree = _read(Path(path) if isinstance(path, str) else path)
        source = _Source(str(path), tree, recorded)
        folder = Path(str(path)).resolve().parent
    for key in [key for key in source.tree if str(key).startswith(FOR_ANCHORS)]:
        del source.tree[key]
    source.check_secrets()
    drop_removed(source.tree, all_values=without_removed)
    for override in overrides:
        source.override(override)
    source.check_secrets()
    source.check_names()
    resolve_paths(source.tree, (folder or Path()).resolve(), source.add, recorded)
    return source


def _copied(tree: Mapping[str, Any]) -> dict[Any, Any]:
    """A copy of a config's content. ConfigError if it is nested too deep to be copied."""
    if too_deep(dict(tree)):
        message, remedy = f"has more than {MAX_DEPTH} values inside of each other", "write fewer"
        raise ConfigError([Problem("the config", "", message, remedy)])
    return copy.deepcopy(dict(tree))


def _validated(source: _Source) -> RunConfig | list[Any]:
    """The config, or pydantic's errors, whose problems are added."""
    context = None if source.recorded else CHECK_NAMES
    try:
        return RunConfig.model_validate(source.tree, context=context)
    except ValidationError as error:
        found: list[Any] = error.errors()
        for entry in found:
            source.problems += _problems(entry, source)
        return found


def _without_secrets(source: _Source) -> list[Problem]:
    """The problems, without secrets in their texts."""
    hide = Redactor(source.tree)
    return [
        Problem(hide(p.where), hide(p.key), hide(p.message), hide(p.remedy))
        for p in source.problems
    ]


def dump_config(config: RunConfig) -> str:
    """YAML that loads to an equal config."""
    return dump_yaml(config.model_dump(by_alias=True))


@dataclass
class _Source:
    """The tree of values, the origin of each value, and the problems so far."""

    file: str
    tree: dict[Any, Any]
    recorded: bool = False
    problems: list[Problem] = field(default_factory=list)
    _overridden: set[str] = field(default_factory=set)

    def where(self, key: str) -> str:
        """The file, or the command line if the key or a section above it was given there."""
        return COMMAND_LINE if any(_lies_in(key, k) for k in self._overridden) else self.file

    def add(self, key: str, message: str, remedy: str) -> None:
        """Adds a problem of a key, with the key's origin."""
        self.problems.append(Problem(self.where(key), key, message, remedy))

    def override(self, text: str) -> None:
        """Applies ``a.b.c=value``; a fault of it is added to the problems."""
        key, equals, raw = text.partition("=")
        parts = [part.strip() for part in key.split(".")]
        if not equals or not all(parts):
            self._refuse(_cut(text), "is not an override", "write key=value, as in train.lr=1e-4")
            return
        if len(parts) > MAX_DEPTH:
            remedy = f"write at most {MAX_DEPTH}"
            self._refuse(f"{key[:40]}…", f"has {len(parts)} parts", remedy)
            return
        try:
            value = load_yaml(raw)
        except YamlError as error:
            quoted = "" if names_secret(parts[-1]) else f"{_shown(raw)} "
            cause = f": {error}" if quoted else ""
            self._refuse(key, f"{quoted}is not valid YAML{cause}", "quote it: key='\"value\"'")
            return
        node: Any = self.tree
        for depth, part in enumerate(parts[:-1], 1):
            section = ".".join(parts[:depth])
            if node.get(part) is None:
                node[part] = {}
                self._overridden.add(section)
            node = node[part]
            if not isinstance(node, dict):
                shown = _shown(_without_names(part, node))
                message = f"{section} is {shown}, which has no keys below it"
                self._refuse(key, message, f"give {section} as a whole")
                return
        node[parts[-1]] = value
        self._overridden.add(".".join(parts))

    def leave_out(self, entry: Any) -> bool:
        """Removes the key of a pydantic error; whether the file has it, and the fault is its own.

        The value of a section that was refused as a whole stays, but for a section that is unknown.
        """
        if isinstance(entry["input"], dict) and entry["type"] != "extra_forbidden":
            return False
        node: Any = self.tree
        key = key_of(entry["loc"])
        *sections, name = key.split(".")
        for section in sections:
            node = node.get(section) if isinstance(node, dict) else None
        if self.where(key) == COMMAND_LINE or not isinstance(node, dict) or name not in node:
            return False
        del node[name]
        return True

    def _refuse(self, key: str, message: str, remedy: str) -> None:
        self.problems.append(Problem(COMMAND_LINE, key, message, remedy))

    def check_secrets(self) -> None:
        """Refuses secrets: the config is written to the run directory and to wandb."""
        for key in take_out(self.tree):
            remedy = (
                "put it into an environment variable; a key of an endpoint is named by "
                "api_key_env, the hub and wandb read HF_TOKEN and WANDB_API_KEY themselves"
            )
            self.add(key, "holds a secret, or what looks like one", remedy)

    def check_names(self) -> None:
        """Refuses names that pydantic would accept, or refuse with a misleading reason."""
        if "async_" in self.tree:
            value = self.tree.pop("async_")
            self.add("async_", f"unknown key (value {_shown(value)})", "did you mean async?")
        loss = self.tree.get("loss")
        culprit = supervised_k1(loss)
        if culprit is not None:
            key = f"loss.{culprit}" if culprit else "loss"
            self.add(key, f"found {_shown(loss)}: {K1_MESSAGE}", K1_REMEDY)
            loss = self.tree["loss"] = without_request(loss)
        if isinstance(loss, dict):
            self.tree["loss"] = {"kind": "forward_kl", **loss}


def _lies_in(key: str, outer: str) -> bool:
    return key == outer or key.startswith(outer + ".")


def _read(file: Readable) -> dict[Any, Any]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_CONFIG_BYTES + 1)
        if len(content) > MAX_CONFIG_BYTES:
            raise ValueError(f"it has more than {MAX_CONFIG_BYTES >> 20} MiB")
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        problem = Problem(f"{file}:{line}", "", "is not UTF-8", "save the file as UTF-8")
        raise ConfigError([problem]) from None
    except (OSError, ValueError) as error:
        cause = getattr(error, "strerror", None) or error
        problem = Problem(str(file), "", f"cannot be read: {cause}", _other_file(file))
        raise ConfigError([problem]) from None
    try:
        tree = load_yaml(text)
    except YamlError as error:
        problems = [
            Problem(f"{file}:{line}", key, f"is not valid YAML: {message}" if not key else message)
            for line, key, message in error.faults
        ]
        raise ConfigError(problems) from None
    if not isinstance(tree, dict):
        found = "nothing" if tree is None else _shown(tree)
        message = f"holds {found}, expected keys and values"
        remedy = f"it needs {', '.join(_required())}"
        raise ConfigError([Problem(str(file), "", message, remedy)])
    return tree


def _other_file(file: Readable) -> str:
    """The remedy for a config that cannot be read: the one in a directory, or a similar path."""
    try:
        is_folder = isinstance(file, Path) and file.is_dir()
    except OSError:  # its name is too long
        return "check the path"
    if not isinstance(file, Path) or not is_folder:
        return nearest_path(file) if isinstance(file, Path) else "check the path"
    inner = file / "config.yaml"
    return f"did you mean {inner}?" if inner.exists() else "name the YAML file"


def _required() -> list[str]:
    return [name for name, info in RunConfig.model_fields.items() if info.is_required()]


def _problems(entry: Any, source: _Source) -> Iterator[Problem]:
    """The problems of one pydantic error."""
    if isinstance(entry.get("ctx", {}).get("error"), SizesError):
        for key, message, remedy in entry["ctx"]["error"].faults:
            yield Problem(source.where(key), key, message, remedy)
        return
    key = key_of(entry["loc"])
    message, remedy = _message(entry, key)
    if entry["type"] in ("union_tag_invalid", "union_tag_not_found"):
        key = f"{key}.kind"
    yield Problem(source.where(key), key, message, remedy)


def _message(entry: Any, key: str) -> tuple[str, str]:
    """Message and remedy for a pydantic error."""
    kind, found = entry["type"], _without_names(key, entry["input"])
    if kind == "extra_forbidden":
        return _unknown(entry["loc"], key, found)
    if kind == "missing":
        return "is missing", f"add {key}"
    if kind == "union_tag_invalid":
        named, allowed = found["kind"], entry["ctx"]["expected_tags"]
        return f"found {named!r}, expected one of {allowed}", nearest(named, allowed)
    if kind in NO_SECTION:
        return f"found {_shown(found)}, expected keys and values", _section_of(key, found)
    expected = str(entry["msg"]).removeprefix("Value error, ")
    expected = re.sub(r"^(Input|Tuple|String|List|Dictionary) should (be|have) ", "", expected)
    default = default_of(key)
    remedy = f"the default is {default!r}" if default is not None else meaning_of(key)
    if kind == "literal_error":
        remedy = nearest(found, entry["ctx"]["expected"]) or remedy
    if kind == "value_error" and isinstance(found, dict):  # the text of a section says what to do
        found = {name: one for name, one in found.items() if str(name) in expected}
        found, remedy = found or "a section", ""
        if key == "cluster.env":  # any value of it may be a secret
            found = ", ".join(map(str, found))
    shown = "a value that is not shown" if found == HIDDEN else _shown(found)
    return f"found {shown}, expected {expected}", remedy


def _section_of(key: str, found: Any) -> str:
    """How to write a section that was given as a text, or which keys it has."""
    name, known = key.rpartition(".")[2], keys_below(key)
    first = "kind" if key == "loss" else "model"
    if isinstance(found, str) and first in known:
        return f"write {name}: {{{first}: {_cut(found)}}}"
    return f"keys of {name}: {', '.join(known[:MAX_SUGGESTED])}" if known else meaning_of(key)


def _cut(text: str) -> str:
    return text if len(text) < MAX_SHOWN_CHARACTERS else f"{text[:MAX_SHOWN_CHARACTERS]}…"


def _unknown(loc: Sequence[int | str], key: str, found: Any) -> tuple[str, str]:
    """Message and remedy for an unknown key, which another kind or version may have."""
    outer, *inner = str(loc[-1]).split(".")
    if all([outer, *inner]) and inner:
        nested = _shown(found)
        for part in reversed(inner):
            nested = f"{{{part}: {nested}}}"
        return f"unknown key (value {_shown(found)})", f"keys nest in YAML: {outer}: {nested}"
    removed = why_removed(key)
    if removed is not None:
        return f"found {_shown(found)}: {removed}", "delete the key"
    renamed = new_name(key)
    if renamed is not None:
        return f"found {_shown(found)}: the key is called {renamed} now", f"write {renamed}"
    section, _, name = key.rpartition(".")
    others = kinds_with(section, name)
    if name in GPU_COUNTS and section in ("", "cluster"):
        return f"unknown key (value {_shown(found)})", GPUS
    foreign = name_here(key)
    if not others and foreign is not None:
        framework, ours = foreign
        if not ours:
            return f"is a section of {framework}", "turn the file into a config: async_opd import"
        return (
            f"unknown key (value {_shown(found)}): {framework}'s name for {ours}",
            f"write {ours}",
        )
    if not others:
        anchors = isinstance(found, dict | list) and not section
        hint = f"; a key that only has YAML anchors begins with {FOR_ANCHORS}" * anchors
        return f"unknown key (value {_shown(found)})", nearest_key(key) + hint
    return (
        f"unknown key of kind {loc[-2]} (value {_shown(found)}): {', '.join(others)} have it",
        f"remove it; an override of {section}.kind keeps the file's other keys, one of {section} "
        "as a whole replaces them",
    )


def _without_names(key: str, found: Any) -> Any:
    """The value, with values of ``*_env`` hidden: a user may have put the key itself there."""
    if key.endswith("_env"):
        return HIDDEN
    if isinstance(found, dict):
        return {name: _without_names(str(name), value) for name, value in found.items()}
    return found
