"""The frameworks whose files are read, and how a file is known to be one of theirs."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from async_opd.config.yaml_text import YamlError, load_yaml
from async_opd.core.errors import ConfigError
from async_opd.files.foreign import foreign
from async_opd.tools.importing import asyncopd, nemo_rl, prime_rl, trl, verl
from async_opd.tools.importing.common import complete
from async_opd.tools.importing.draft import FILE_BYTES, Budget, Draft, Expression, add, flat
from async_opd.tools.importing.python_script import CONFIGS, read_python
from async_opd.tools.importing.shell import flags, overrides, read_shell
from async_opd.tools.importing.table import Table, table_of

VERLS = r"(?:fully_async_)?ppo(?:_megatron)?_trainer(?:\.yaml)?$"
CONFIG = re.compile(rf"^(?:--config(?:-name)?|-cn)[=\n](?!{VERLS})(.+)$", re.MULTILINE)
"""A file with more keys that a command names, as Hydra and TRL do; not one of verl's own."""
MAX_PARTS = 64
LONG_KEY = re.compile(rf"""(?:\.[ \t]*(?:[\w-]+|"[^"\n]*"|'[^'\n]*')[ \t]*){{{MAX_PARTS}}}""")
"""A dotted key for which tomllib would take time and memory by the square of its parts."""


@dataclass(frozen=True)
class Framework:
    """The function of several keys together, and keys that are found nowhere else."""

    name: str
    together: Callable[[Draft], None]
    marks: tuple[str, ...]

    @property
    def table(self) -> Table:
        """The entry of each key."""
        return table_of(self.name)


FRAMEWORKS = {
    one.name: one
    for one in (
        Framework("verl", verl.together, ("actor_rollout_ref.", "distillation.teacher")),
        Framework("nemo-rl", nemo_rl.together, ("loss_fn.", "policy.")),
        Framework("asyncopd", asyncopd.together, ("algorithm.opd.", "algorithm.")),
        Framework("prime-rl", prime_rl.together, ("orchestrator.", "trainer.loss.")),
        Framework(
            "trl", trl.together, ("config_class", trl.TEACHER, "teacher_server_urls", "lmbda")
        ),
    )
}
KNOWN = f"name the framework by --from: {', '.join(FRAMEWORKS)}"


@dataclass
class Parsed:
    """The keys of a file and of its ``parents``, those that are ``missing``, and other notes."""

    keys: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)
    parents: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)


def parse(path: Path, name: str | None = None) -> Parsed:
    """The keys of a script or config. ConfigError if it cannot be read or has none.

    ``name`` is the framework's, for flags of a command that no framework is known by.
    """
    try:
        parsed = _parse(path, name)
    except UnicodeDecodeError as error:
        remedy = "give a .sh, .py, .toml or .yaml file: this one is not text"
        raise _refused(path, f"is not UTF-8: {error}", remedy) from error
    except OSError as error:
        raise _refused(path, f"cannot be read: {error}", "check the path") from error
    except (YamlError, SyntaxError, RecursionError, ValueError, TypeError, MemoryError) as error:
        remedy = "give a .sh, .py, .toml or .yaml file"
        raise _refused(path, f"cannot be parsed: {error}", remedy) from error
    if not parsed.keys:
        remedy = f"give the file that sets the run's keys, or {KNOWN}"
        raise _refused(path, "sets no key of a framework that is known here", remedy)
    if isinstance(parsed.keys.get("args"), Expression) and path.suffix == ".py":
        remedy = "write the command that starts it, with its flags, into a .sh file: import that"
        message = f"has no settings: its trainer takes args={parsed.keys['args'].text}"
        raise _refused(path, message, remedy)
    return parsed


def framework_of(path: Path, keys: Mapping[str, Any], name: str | None) -> Framework:
    """The framework that is named, else the first one that the keys show. ConfigError."""
    if name is not None:
        return FRAMEWORKS[name]
    for framework in FRAMEWORKS.values():
        if any(key.startswith(mark) for mark in framework.marks for key in keys):
            return framework
    message = f"is of no framework that is known here: its keys are {', '.join(list(keys)[:5])} …"
    raise _refused(path, message, KNOWN)


def drafted(framework: Framework, keys: Mapping[str, Any]) -> Draft:
    """The config that the keys become, with an account of each of them."""
    draft = Draft(keys, framework.table)
    draft.apply()
    framework.together(draft)
    draft.fill_unreadable()
    complete(draft)
    draft.account()
    return draft


def _refused(path: Path, message: str, remedy: str) -> ConfigError:
    return ConfigError.of("", message, remedy, str(path))


def _parse(path: Path, name: str | None) -> Parsed:
    budget = Budget()
    if path.suffix in (".yaml", ".yml"):
        keys, parents, missing = read_yaml(path, budget)
        return Parsed(keys, [], parents, missing)
    text = foreign(path).read(FILE_BYTES).decode()
    if path.suffix == ".toml":
        if long := LONG_KEY.search(text):
            raise ValueError(f"a key has more than {MAX_PARTS} parts: {long[0][:80]!r}")
        return Parsed(flat(tomllib.loads(text), budget))
    if path.suffix == ".py":
        return Parsed(*read_python(text, budget))
    return _parse_shell(text, budget, name)


def config_class(words: list[str]) -> dict[str, str]:
    """TRL's config class by the script's name: ``gold.py`` and ``trl gold`` have GOLDConfig."""
    names = {name.removesuffix("Config").lower(): name for name in CONFIGS}
    scripts = (Path(word).stem.replace("_", "") for word in words)
    named = next((names[one] for one in scripts if one in names), None)
    return {} if named is None else {"config_class": named}


def _parse_shell(text: str, budget: Budget, name: str | None) -> Parsed:
    """The overrides of the script's commands, or the flags of the one that trains a student."""
    script = read_shell(text, budget)
    found = [(words, overrides(words, budget)) for words in script.commands]
    keys = [key for _, one in found for key in one]
    if name == "trl" or not any(key.startswith("actor_rollout_ref.") for key in keys):
        students = trl.STUDENTS if name == "trl" else set[str]()
        given = ((words, {**config_class(words), **flags(words, budget)}) for words, _ in found)
        found = [one for one in given if {trl.TEACHER, *students} & one[1].keys()] or found
    merged: dict[str, Any] = {}
    for _, one in found:
        add(merged, one)
    files = CONFIG.findall("\n".join(word for words, one in found if one for word in [*words, ""]))
    notes = [f"not read: {line}" for line in dict.fromkeys(script.skipped)]
    return Parsed(merged, notes, [], files)


REFERENCE = re.compile(r"\$\{(\.*)(\w[\w.]*)\}")
PRODUCT = re.compile(r"\$\{mul:\s*([\d.]+)\s*,\s*([\d.]+)\s*\}")
MAX_PARENTS = 8


def read_yaml(path: Path, budget: Budget) -> tuple[dict[str, Any], list[str], list[str]]:
    """The leaves by dotted key, the parents, and those that are missing. OSError.

    YamlError for a value that refers to itself; SyntaxError if they are more than the budget.
    """
    parents, missing = list[str](), list[str]()
    tree = _with_parents(path, parents, missing)
    references = _References(flat(tree, budget), budget)
    leaves = {key: references.resolved(key, ()) for key in references.leaves}
    return leaves, parents, missing


def _with_parents(path: Path, parents: list[str], missing: list[str]) -> dict[str, Any]:
    """The tree of a file over those of its parents, whose names are added to the lists."""
    tree = load_yaml(foreign(path).read(FILE_BYTES).decode())
    if not isinstance(tree, dict):
        return {}
    parent = tree.get("defaults")
    if not isinstance(parent, str) or len(parents) >= MAX_PARENTS:
        return tree
    del tree["defaults"]
    file = path.parent / parent
    if not file.is_file():
        missing.append(parent)
        return tree
    parents.append(parent)
    merged: dict[str, Any] = _merged(_with_parents(file, parents, missing), tree)
    return merged


def _merged(above: Any, tree: Any) -> Any:
    if not (isinstance(above, dict) and isinstance(tree, dict)):
        return tree
    both = {name: _merged(above[name], tree[name]) for name in above.keys() & tree.keys()}
    return {**above, **tree, **both}


@dataclass
class _References:
    """``known`` are the values of keys that were resolved before."""

    leaves: dict[str, Any]
    budget: Budget
    known: dict[str, Any] = field(default_factory=dict)

    def resolved(self, key: str, above: tuple[str, ...]) -> Any:
        """The value of a key that the keys ``above`` refer to."""
        if key in above:
            raise YamlError([(1, key, f"{key} refers to itself: {' → '.join((*above, key))}")])
        if key not in self.known:
            value = self.leaves[key]
            found = isinstance(value, str) and "${" in value
            self.known[key] = self._filled(key, value, (*above, key)) if found else value
        return self.known[key]

    def _filled(self, key: str, value: str, above: tuple[str, ...]) -> Any:
        """The value with its references in place; one to no key stays as it is."""

        def target(found: re.Match[str]) -> Any:
            name = _target(key, found[1], found[2])
            value = self.resolved(name, above) if name in self.leaves else found[0]
            self.budget.take(len(name) + len(str(value)), key)
            return value

        if whole := REFERENCE.fullmatch(value):
            return target(whole)
        value = REFERENCE.sub(lambda found: str(target(found)), value)
        value = PRODUCT.sub(lambda found: f"{float(found[1]) * float(found[2]):g}", value)
        return float(value) if re.fullmatch(r"\d+(\.\d+)?(e\+\d+)?", value) else value


def _target(key: str, dots: str, name: str) -> str:
    """The dotted key of a reference: one dot means the section itself, each further one above."""
    above = key.split(".")[: -len(dots)] if dots else []
    return ".".join([*above, name])
