"""The tree of config keys: all keys, the dotted key of a pydantic error, the nearest known key."""

from __future__ import annotations

import difflib
import re
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.evaluation import EvalConfig
from async_opd.config.sections.reliability import GuardrailConfig, SupervisionConfig
from async_opd.config.sections.section import Section
from async_opd.config.sections.teachers import CallHealth

ROOT: Any = RunConfig


@dataclass(frozen=True)
class Removed:
    """Why a key of earlier versions was removed, and what replaces it.

    ``value`` is what the other keys of its section give now; None where nothing replaces it.
    """

    why: str
    value: Callable[[Mapping[str, Any]], float] | None = None

    def changes_nothing(self, name: str, section: Mapping[str, Any]) -> bool:
        """Whether a section has the key with the value that replaces it."""
        try:
            return self.value is not None and section[name] == self.value(section)
        except ValueError:  # the problem of the other key is reported
            return False


def _given_by(kind: type[Section], key: str, name: str) -> Callable[[Mapping[str, Any]], float]:
    """A section's value ``name`` by its ``key``. ValueError for a value that ``key`` refuses."""

    def value(given: Mapping[str, Any]) -> float:
        return float(
            getattr(kind.model_validate({k: v for k, v in given.items() if k == key}), name)
        )

    return value


REMOVED = {
    "teachers.*.early_tokens": Removed(
        "scoring while the student decodes was removed: it gained nothing where response lengths "
        "vary (docs/adr/0008-no-scoring-while-decoding.md)"
    ),
    "teachers.*.health.min_response_tokens_per_s": Removed(
        "the speed of one response is a fortieth of health.min_tokens_per_s, that of a replica",
        _given_by(CallHealth, "min_tokens_per_s", "min_response_tokens_per_s"),
    ),
    "train.lora.dropout": Removed(
        "the engines sample without dropout, and with it the student would be trained as another "
        "model than the one that was sampled",
        lambda lora: 0,
    ),
    "sync.tries": Removed(
        "a sync that fails without a failed replica is tried 3 times", lambda sync: 3
    ),
    "eval.samples_total_mib": Removed(
        "all files of answers take at most 64 times eval.samples_mib",
        _given_by(EvalConfig, "samples_mib", "samples_total_mib"),
    ),
    "guardrail.baseline_steps": Removed(
        "the baseline of the length is the mean of the first guardrail.window steps",
        _given_by(GuardrailConfig, "window", "window"),
    ),
    "supervision.heartbeat_s": Removed(
        "heartbeats come six times in supervision.timeout_s: lower or raise that",
        _given_by(SupervisionConfig, "timeout_s", "heartbeat_s"),
    ),
}
"""By patterns of keys that earlier versions had."""
BY_TURN = (
    "a baseline for each turn's index is biased where episodes differ in their turns: an episode "
    "is paid for each turn that it adds; advantages are of whole episodes"
)
REFUSED = dict.fromkeys(("reward.turn*", "reward.per_turn*", "reward.*_turn*"), BY_TURN)
"""By patterns of keys that other frameworks have and a config here will not."""
RENAMED = {
    "sync.on_stale": "sync.on_wrong_weights",
    "supervision.tries": "supervision.max_restarts",
    "teachers.*.health.rebuilds": "supervision.max_restarts",
    "teachers.*.health.probe_s": "supervision.delay_s",
}
"""The key that now means the same, by patterns of keys that earlier versions had."""


def key_of(loc: Iterable[int | str]) -> str:
    """The dotted key of a pydantic location, without the tags that pydantic adds for unions."""
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
    """The keys of a section, of all its kinds together; none if ``key`` is not a section."""
    return list(dict.fromkeys(name for name, _ in _fields(_annotations(key))))


def kinds_with(key: str, name: str) -> list[str]:
    """The kinds of a section that have a field of this name; none if it has no kinds."""
    choices = (section for place in _annotations(key) for section in sections(place))
    with_name = (one for one in choices if any(name == own for own, _ in _fields([one])))
    return [kind for one in with_name for kind in _kinds(one)]


def default_of(key: str) -> Any:
    """The default of a plain field, or None."""
    parent, _, name = key.rpartition(".")
    for field, info in _fields(_annotations(parent)):
        if field == name and not info.is_required() and not isinstance(info.default, BaseModel):
            return info.default
    return None


def meaning_of(key: str) -> str:
    """The first sentence of a key's docstring, else of its section's; of a ``kind`` all kinds."""
    parent, _, name = key.rpartition(".")
    if name == "kind":
        choices = (one for place in _annotations(parent) for one in sections(place))
        return ", ".join(kind for one in choices for kind in _kinds(one))
    for field, info in _fields(_annotations(parent)):
        inner = sections(info.annotation)
        if field == name and (info.description or len(inner) == 1):
            return _first_sentence(info.description or inner[0].__doc__ or "")
    return ""


def _first_sentence(text: str) -> str:
    return re.split(r"\.(?:\s|$)", " ".join(text.split()).replace("``", "`"), maxsplit=1)[0]


def why_removed(key: str) -> str | None:
    """The reason why a key was removed, or never had a place here; None for any other key."""
    reasons = {**{pattern: one.why for pattern, one in REMOVED.items()}, **REFUSED}
    return next((why for pattern, why in reasons.items() if fnmatchcase(key, pattern)), None)


def drop_removed(tree: dict[Any, Any], *, all_values: bool = False) -> None:
    """Deletes keys of earlier versions from a config's content that change nothing, or all.

    With ``all_values`` it is the config of a run that has begun, which no user can correct.
    """
    for pattern, removed in REMOVED.items():
        *outer, name = pattern.split(".")
        for section in _below_pattern(tree, outer):
            if name in section and (all_values or removed.changes_nothing(name, section)):
                del section[name]


def _below_pattern(tree: Any, parts: Sequence[str]) -> Iterator[dict[Any, Any]]:
    """The sections that a pattern of keys means."""
    if not isinstance(tree, dict):
        return
    if not parts:
        yield tree
        return
    for name in list(tree) if parts[0] == "*" else parts[:1]:
        yield from _below_pattern(tree.get(name), parts[1:])


def new_name(key: str) -> str | None:
    """The present name of a key of earlier versions; None for any other key."""
    return next((new for pattern, new in RENAMED.items() if fnmatchcase(key, pattern)), None)


def keys_called(name: str) -> list[str]:
    """All dotted keys that end in ``name``, with ``<name>`` for the name of a teacher."""
    return [key for key in all_keys() if key.rpartition(".")[2] == name]


def all_keys() -> list[str]:
    """All dotted keys, of all kinds of sections, with ``<name>`` for the name of a teacher."""
    return list(_all_keys(ROOT, ""))


def sections(annotation: Any) -> list[type[BaseModel]]:
    """The sections that a value itself can be, without those inside of a list or dict."""
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


@lru_cache(1000)
def _annotations(key: str) -> Sequence[Any]:
    """The annotations of the values that a dotted key can have."""
    places: list[Any] = [ROOT]
    for part in key.split(".") if key else []:
        places = _below(places, part)
    return places


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


MAX_SUGGESTED = 12


def nearest(found: Any, allowed: str) -> str:
    """A suggestion of the closest quoted word in ``allowed``, or the empty string."""
    near = difflib.get_close_matches(str(found).lower(), re.findall(r"'([^']+)'", allowed), n=1)
    return f"did you mean {near[0]}?" if near else ""


def nearest_key(key: str) -> str:
    """A suggestion of a similar key, or the keys that its section has."""
    parent, _, name = key.rpartition(".")
    known = keys_below(parent)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if near:
        return f"did you mean {f'{parent}.{near[0]}'.lstrip('.')}?"
    elsewhere = keys_called(name)
    if elsewhere:
        return f"did you mean {' or '.join(elsewhere[:3])}?"
    return f"known here: {', '.join(known[:MAX_SUGGESTED])}" if known else "remove it"
