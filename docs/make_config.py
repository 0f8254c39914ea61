"""Writes docs/config.md from the docstrings under the fields of ``async_opd.config.run_config``.

python docs/make_config.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from annotated_types import Gt
from pydantic import BaseModel

from async_opd.config.run_config import RunConfig

HEAD = """# Config

Made by `python docs/make_config.py` from the code. Precedence: defaults < YAML < command line
(`a.b.c=value`). Unknown keys are refused. `<name>` stands for a name you choose.
"""


def sections(annotation: Any) -> list[type[BaseModel]]:
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


def rows(section: type[BaseModel], prefix: str) -> Iterator[str]:
    """Table rows of a section's own keys."""
    for name, info in section.model_fields.items():
        if sections(info.annotation):
            continue
        key = f"{prefix}{info.alias or name}"
        value = info.get_default(call_default_factory=True)
        default = "required" if info.is_required() else f"`{value!r}`"
        text = " ".join((info.description or "").split()).replace("|", "\\|")
        yield f"| `{key}` | {type_name(info.annotation)} | {default} | {text} |"


def tables(section: type[BaseModel], prefix: str, title: str) -> Iterator[str]:
    """A section's table, then those of the sections inside of it."""
    own = list(rows(section, prefix))
    doc = " ".join((section.__doc__ or "").split())
    yield f"## {title}\n\n{doc}\n"
    if own:
        yield "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *own]) + "\n"
    for name, info in section.model_fields.items():
        inner = sections(info.annotation)
        label = info.alias or name
        many = ".<name>" if "dict" in str(info.annotation) else ""
        many = "[]" if "list" in str(info.annotation) else many
        for choice in inner:
            kind = choice.model_fields.get("kind")
            suffix = f", kind: {' | '.join(get_args(kind.annotation))}" if kind else ""
            yield from tables(choice, f"{prefix}{label}{many}.", f"`{prefix}{label}{many}`{suffix}")


def document() -> str:
    """The whole file."""
    return "\n".join([HEAD, *tables(RunConfig, "", "the run")])


if __name__ == "__main__":
    target = Path(__file__).parent / "config.md"
    target.write_text(document(), encoding="utf-8")
    sys.stdout.write(f"{target}\n")
