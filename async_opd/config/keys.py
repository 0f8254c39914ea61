"""The tree of config keys: which keys there are, and what a user calls the place of an error."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from async_opd.config.run_config import RunConfig

ROOT: Any = RunConfig
REMOVED = {
    "teachers.*.early_tokens": "scoring while the student decodes was removed: it gained nothing "
    "where response lengths vary (docs/adr/0008-no-scoring-while-decoding.md)",
}
"""Patterns of keys that earlier versions had, and why this one does not."""
RENAMED = {
    "supervision.tries": "supervision.max_restarts",
    "teachers.*.health.rebuilds": "supervision.max_restarts",
    "teachers.*.health.probe_s": "supervision.delay_s",
}
"""Patterns of keys that earlier versions had, and the key that now means the same."""


def key_of(loc: Iterable[int | str]) -> str:
    """The dotted key of a pydantic location, without the tags it adds for unions."""
    parts: list[str] = []
    places: list[Any] = [ROOT]
    for item in loc:
        choices = [section for place in places for section in sections(place)]
        tagged = [section for section in choices if item in _kinds(section)]
        if len(choices) > 1 and tagged:
            places = [*tagged]
            continue
        if item == "[key]":
            break
        parts.append("async" if item == "async_" else str(item))
        places = _below(places, str(item))
    return ".".join(parts)


def keys_below(key: str) -> list[str]:
    """The keys a section has, all of its kinds together; none if ``key`` is no section."""
    places: list[Any] = [ROOT]
    for part in key.split(".") if key else []:
        places = _below(places, part)
    return list(dict.fromkeys(name for name, _ in _fields(places)))


def kinds_with(key: str, name: str) -> list[str]:
    """The kinds of a section that have a field of this name; none if it has no kinds."""
    places: list[Any] = [ROOT]
    for part in key.split(".") if key else []:
        places = _below(places, part)
    found = (section for place in places for section in sections(place))
    with_name = (one for one in found if any(name == own for own, _ in _fields([one])))
    return [kind for one in with_name for kind in _kinds(one)]


def default_of(key: str) -> Any:
    """A plain field's default, or None."""
    parent, _, name = key.rpartition(".")
    places: list[Any] = [ROOT]
    for part in parent.split(".") if parent else []:
        places = _below(places, part)
    for field, info in _fields(places):
        if field == name and not info.is_required() and not isinstance(info.default, BaseModel):
            return info.default
    return None


def why_removed(key: str) -> str | None:
    """Why a key of earlier versions is gone; None if there never was one."""
    return next((why for pattern, why in REMOVED.items() if fnmatchcase(key, pattern)), None)


def new_name(key: str) -> str | None:
    """What a key of earlier versions is called now; None if there never was one."""
    return next((new for pattern, new in RENAMED.items() if fnmatchcase(key, pattern)), None)


def keys_called(name: str) -> list[str]:
    """The dotted keys anywhere that end in ``name``, names of teachers left open."""
    return [key for key in _all_keys(ROOT, "") if key.rpartition(".")[2] == name]


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections a value itself can be (not those inside of a list or dict)."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in (Union, types.UnionType, Annotated):
        return [section for inner in get_args(annotation) for section in sections(inner)]
    return []


def _all_keys(annotation: Any, prefix: str) -> Iterator[str]:
    if get_origin(annotation) is dict:
        yield from _all_keys(get_args(annotation)[-1], f"{prefix}<name>.")
    for name, info in _fields([annotation]):
        yield f"{prefix}{name}"
        yield from _all_keys(info.annotation, f"{prefix}{name}.")


def _below(places: Sequence[Any], part: str) -> list[Any]:
    below = [info.annotation for name, info in _fields(places) if name == part]
    containers = (place for place in places if get_origin(place) in (list, dict, tuple))
    return below + [get_args(place)[-1] for place in containers]


def _fields(places: Sequence[Any]) -> Iterator[tuple[str, FieldInfo]]:
    for place in places:
        for section in sections(place):
            for name, info in section.model_fields.items():
                yield info.alias or name, info


def _kinds(section: type[BaseModel]) -> tuple[Any, ...]:
    kind = section.model_fields.get("kind")
    return get_args(kind.annotation) if kind else ()
