"""A config as YAML whose comments are the docstrings of its keys.

Keys that many users change follow those that are set, commented out, with their defaults.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from async_opd.config.keys import default_of, keys_below, kinds_with, meaning_of
from async_opd.config.yaml_text import dump_yaml
from async_opd.core.printable import on_one_line

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
