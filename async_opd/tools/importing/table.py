"""A framework's table of keys: ``tables/NAME.yaml``, one entry for each of its keys.

    keys:
      their.section:
        a: train.lr                                      one key here has its value
        b: {to: train.steps, as: whole, default: 10}     converted; the default is theirs
        c: [train.batch_size, train.ranks]               gives these together with other keys
        d: {note: named if on}                           no key here, but a line of the comments
    no meaning:
      the reason: [their.section.e, "their.other.*"]

In keys ``*`` stands for any text; the first entry that fits counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from importlib.resources import files
from typing import Any

from async_opd.config.yaml_text import load_yaml


class NoCounterpart(ValueError):
    """A value that has no counterpart here; its text says why."""


UNSTATED = object()
"""The ``default`` of a key that the framework requires, or whose default depends on others."""
REDUCTIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm")
SCHEDULES = {"constant": "constant", "constant_with_warmup": "constant", "cosine": "cosine"}


def paths(value: Any) -> list[str]:
    """One path or several, as a list."""
    return [str(one) for one in value] if isinstance(value, list) else [str(value)]


def _schedule(value: Any) -> str:
    if value not in SCHEDULES:
        raise NoCounterpart(f"there is no schedule {value!r} here: constant and cosine are")
    return SCHEDULES[value]


def _reduction(value: Any) -> str:
    return REDUCTIONS[REDUCTIONS.index(str(value).replace("-", "_"))]


CONVERSIONS: dict[str, Callable[[Any], Any]] = {
    "same": lambda value: value,
    "beta2": lambda beta: [0.9, beta],
    "full_or_none": lambda on: "full" if on else "none",
    "if_on": lambda on: True if on else None,
    "list": list,
    "name": lambda name: str(name).replace("/", "-"),
    "not_negative": lambda number: max(int(number), 0),
    "paths": paths,
    "reduction": _reduction,
    "revision": lambda name: None if name == "main" else name,
    "schedule": _schedule,
    "top_k": lambda number: max(int(number or 0), 0),
}
"""Values here by theirs, by the names that tables give; None means the default here."""


@dataclass(frozen=True)
class Entry:
    """The use of a key; ``<name>`` in ``ours`` stands for a teacher's name.

    ``reason``: it has no meaning here. ``note``: no key here has it. ``together``: it gives
    ``ours`` together with other keys. Else it gives the one key in ``ours``, by ``convert``.
    """

    ours: tuple[str, ...] = ()
    together: bool = False
    convert: str = "same"
    default: Any = UNSTATED
    note: str = ""
    reason: str = ""


Table = Mapping[str, Entry]


@cache
def content_of(framework: str) -> dict[str, Any]:
    """The content of a framework's file."""
    name = f"{framework.replace('-', '_')}.yaml"
    file = files(__package__).joinpath("tables", name)
    tree: dict[str, Any] = load_yaml(file.read_text(encoding="utf-8"))
    return tree


@cache
def table_of(framework: str) -> Table:
    """The entries of a framework by key or pattern."""
    tree = content_of(framework)
    table = dict(_entries(tree["keys"], ""))
    return table | {
        key: Entry(reason=reason) for reason, keys in tree["no meaning"].items() for key in keys
    }


def _entries(tree: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Entry]]:
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if isinstance(value, str):
            yield key, Entry((value,))
        elif isinstance(value, list):
            yield key, Entry(tuple(value), together=True)
        elif "to" in value:
            convert, default = value.get("as", "same"), value.get("default", UNSTATED)
            yield key, Entry((value["to"],), convert=convert, default=default)
        elif "note" in value:
            yield key, Entry(note=value["note"])
        else:
            yield from _entries(value, f"{key}.")


def entry_of(table: Table, key: str) -> Entry | None:
    """The entry of a key: its own, else the first pattern that fits."""
    if key in table:
        return table[key]
    return next((entry for pattern, entry in table.items() if fnmatchcase(key, pattern)), None)
