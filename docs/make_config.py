"""Writes docs/config.md from the docstrings under the fields of ``async_opd.config.run_config``.

Keys of a class that several sections are, or inherit from, are printed once, below the sections.

python docs/make_config.py
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Gt
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from async_opd.config.run_config import RunConfig

HEAD = """# Config

Made by `python docs/make_config.py` from the code. Precedence: defaults < YAML < command line
(`a.b.c=value`). Unknown keys are refused, but top-level ones that begin with `x-` are ignored: they
may hold values with YAML anchors. `<name>` stands for a name you choose. Keys that several
sections have come once, in the second part.
"""
SHARED = "## Keys of several sections\n"
Model = type[BaseModel]


@dataclass(frozen=True)
class Use:
    """A section of the config: its dotted key, '' for the whole, and its class."""

    key: str
    section: Model

    @property
    def kinds(self) -> tuple[str, ...]:
        """The values of ``kind`` with which the section has this class; none without kinds."""
        kind = self.section.model_fields.get("kind")
        return get_args(kind.annotation) if kind else ()

    @property
    def name(self) -> str:
        """The key, and the kinds, for people."""
        kinds = f", kind: {' | '.join(self.kinds)}" if self.kinds else ""
        return f"`{self.key}`{kinds}" if self.key else "the run"


def sections(annotation: Any) -> list[Model]:
    """The config sections an annotation can hold."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [section for inner in get_args(annotation) for section in sections(inner)]


def type_name(annotation: Any) -> str:
    """The type, for people."""
    if get_origin(annotation) in (Union, UnionType):
        return " or ".join(map(type_name, get_args(annotation)))
    if get_origin(annotation) is Annotated:
        inner, bound = get_args(annotation)[:2]
        return type_name(inner) + (f" > {bound.gt}" if isinstance(bound, Gt) else "")
    if get_origin(annotation) in (list, tuple):
        inner = ("..." if one is ... else type_name(one) for one in get_args(annotation))
        return f"{get_origin(annotation).__name__}[{', '.join(inner)}]"
    name = annotation.__name__ if isinstance(annotation, type) else str(annotation)
    name = str(annotation) if get_args(annotation) else name
    name = name.replace("typing.", "").replace("Annotated[int, Gt(gt=0)]", "int > 0")
    return name.replace("|", "or").replace("NoneType", "none").replace("None", "none")


def used(use: Use) -> Iterator[Use]:
    """The section, then those inside of it."""
    yield use
    for name, info in use.section.model_fields.items():
        many = ".<name>" if "dict" in str(info.annotation) else ""
        many = "[]" if "list" in str(info.annotation) else many
        key = f"{use.key}.{info.alias or name}{many}".lstrip(".")
        for section in sections(info.annotation):
            yield from used(Use(key, section))


@cache
def by_key() -> dict[str, list[Use]]:
    """All sections by key: several for one that has kinds, or is below one that has them."""
    found: dict[str, list[Use]] = {}
    for use in dict.fromkeys(used(Use("", RunConfig))):
        found.setdefault(use.key, []).append(use)
    return found


def of_class(section: Model) -> list[Use]:
    """The sections that are of the class, or inherit from it."""
    return [use for alike in by_key().values() for use in alike if issubclass(use.section, section)]


def own_keys(section: Model) -> list[str]:
    """The plain keys that the class itself declares, without ``kind``."""
    declared = inspect.get_annotations(section).keys() - {"kind"}
    fields = section.model_fields.items()
    return [name for name, info in fields if name in declared and not sections(info.annotation)]


def parts(section: Model) -> list[Model]:
    """The class and its bases, as far as they have keys themselves."""
    return [one for one in section.__mro__ if issubclass(one, BaseModel) and own_keys(one)]


def title(section: Model) -> str:
    """The heading of a class that several sections have, as ``Row source``."""
    words = re.findall("[A-Z]+[a-z]*", re.sub("(Config|Section)$", "", section.__name__))
    return " ".join(words).capitalize()


def text(section: Model) -> str:
    """The docstring as one line."""
    return " ".join((section.__doc__ or "").split()) + "\n"


def rows(section: Model, prefix: str) -> list[str]:
    """Table rows of the keys that the class itself declares."""
    return [row(prefix, section.model_fields[name], name) for name in own_keys(section)]


def row(prefix: str, info: FieldInfo, name: str) -> str:
    """The table row of a key."""
    value = info.get_default(call_default_factory=True)
    default = "required" if info.is_required() else f"`{value!r}`"
    meaning = " ".join((info.description or "").split()).replace("|", "\\|")
    return (
        f"| `{prefix}{info.alias or name}` | {type_name(info.annotation)} | {default} | {meaning} |"
    )


def kind_rows(key: str, alike: Sequence[Use]) -> list[str]:
    """The row of ``kind``, in a section that has several classes."""
    fields = [use.section.model_fields["kind"] for use in alike if use.kinds]
    default = next((f"`{one.default!r}`" for one in fields if not one.is_required()), "required")
    names = ", ".join(f"`{kind}`" for use in alike for kind in use.kinds)
    return [f"| `{key}.kind` | str | {default} | {names}. |"] if fields else []


def table(found: Sequence[str]) -> str:
    """The rows below their head; '' without rows."""
    head = ["| key | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *found]) + "\n" if found else ""


def first_part() -> Iterator[str]:
    """The sections in their order, each with its keys and links to those that others have too."""
    printed: dict[tuple[Model, ...], str] = {}
    for key, alike in by_key().items():
        before = printed.setdefault(tuple(use.section for use in alike), key)
        if len(alike) > 1 and before != key:
            yield f"## `{key}`\n\nAs `{before}`.\n"
            continue
        found = kind_rows(key, alike)
        for use in alike:
            shared = [one for one in parts(use.section) if len(of_class(one)) > 1]
            own = [one for one in parts(use.section) if one not in shared]
            found += [line for one in own for line in rows(one, f"{key}." if key else "")]
            links = [f"[{title(one)}](#{title(one).lower().replace(' ', '-')})" for one in shared]
            yield f"## {use.name}\n"
            yield text(use.section) if use.section not in shared else ""
            yield f"It has the keys of {', '.join(links)}.\n" if links else ""
            yield table(found)
            found = []


def second_part() -> Iterator[str]:
    """The classes that several sections have in common."""
    whole = (use.section for alike in by_key().values() for use in alike)
    for section in dict.fromkeys(one for each in whole for one in parts(each)):
        keys = list(dict.fromkeys(use.key for use in of_class(section)))
        if len(of_class(section)) == 1:
            continue
        last = {key.rpartition(".")[2] for key in keys}
        prefix = f"{keys[0]}." if len(keys) == 1 else f"{last.pop()}." if len(last) == 1 else ""
        yield f"### {title(section)}\n"
        yield f"{text(section)}\nIn {', '.join(place(section, key) for key in keys)}.\n"
        yield table(rows(section, prefix))


def place(section: Model, key: str) -> str:
    """The key, with the kinds that have the class unless all of them have it."""
    alike = by_key()[key]
    every = [kind for use in alike for kind in use.kinds]
    having = [kind for use in alike if issubclass(use.section, section) for kind in use.kinds]
    return f"`{key}`" + (f" (kind: {' | '.join(having)})" if having != every else "")


def document() -> str:
    """The whole file."""
    return "\n".join(part for part in [HEAD, *first_part(), SHARED, *second_part()] if part)


if __name__ == "__main__":
    target = Path(__file__).parent / "config.md"
    target.write_text(document(), encoding="utf-8")
    sys.stdout.write(f"{target}\n")
