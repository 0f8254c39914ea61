"""The form in which a chat template writes calls of tools, read off a call that it renders.

    a probe's call ──template──► text ──derive──► CallForm
    text of a sampled turn ──read──► text without calls, calls, reasons of malformed ones

Three forms: one JSON object (``{"name": …, "arguments": {…}}``, also in a list), a name before a
JSON object, and tags around names and values. White space around the parts of a form is free.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple, Protocol, Self

from async_opd.core.environments import ToolCall
from async_opd.core.nesting import MAX_DEPTH, too_deep

Shown = Callable[[Sequence[ToolCall]], str]
"""The text that a template makes of an assistant's calls, without header and end of the turn."""
Tools = Sequence[dict[str, Any]]

PROBE_CALL = ToolCall("zqtool", {"zqone": "zqfirst", "zqtwo": "zqsecond"})
OTHER_CALL = ToolCall("zqother", {"zqthree": "zqthird", "zqfour": "zqfourth"})
HARD_CALL = ToolCall(
    "zqtool",
    {
        "zqone": 'two\n"lines", a \\ and <b>é ✓</b>',
        "zqtwo": {"a": [1, 2.5, None, True, {"b": "c'd"}], "e": ""},
        "zqthree": "42",
        "zqfour": -7,
        "zqfive": False,
    },
)
PROBE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": PROBE_CALL.name,
        "description": "zqdescription",
        "parameters": {
            "type": "object",
            "properties": {
                "zqone": {"type": "string", "description": "zqtext"},
                "zqtwo": {"type": "object", "description": "zqtext"},
                "zqthree": {"type": "string", "description": "zqtext"},
                "zqfour": {"type": "integer", "description": "zqtext"},
                "zqfive": {"type": "boolean", "description": "zqtext"},
            },
            "required": [],
        },
    },
}


MAX_CALLS = 16
"""Calls of a turn that are read, with malformed ones; the rest of its text is one more reason."""


class Malformed(ValueError):
    """A call that cannot be read; the text is the reason."""


TOO_MANY = f"a turn may have {MAX_CALLS} calls: those after them were not read"


class Reading(NamedTuple):
    """A turn's text: ``content`` has also the calls that could not be read, with their reasons."""

    content: str
    calls: tuple[ToolCall, ...]
    malformed: tuple[str, ...]


class Body(Protocol):
    """The inside of a call, between its begin and its end."""

    def read(self, text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        """The calls at a place of the text, and the place behind them. Malformed."""
        ...


@dataclass(frozen=True)
class JsonBody:
    """An object, or a list of them; ``name`` and ``arguments`` are its keys."""

    name: str
    arguments: str

    def read(self, text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        """See Body.read."""
        value, stop = _decoded(text, at)
        return list(map(self._call, value if isinstance(value, list) else [value])), stop

    def _call(self, value: Any) -> ToolCall:
        if not isinstance(value, dict):
            raise Malformed("a call has to be a JSON object")
        name = value.get(self.name)
        if not isinstance(name, str) or not name:
            raise Malformed(f"a call needs the name of a tool as {self.name!r}")
        return ToolCall(name, _object(value.get(self.arguments, {}), self.arguments))


@dataclass(frozen=True)
class NamedBody:
    """A name, a separator, and the arguments as a JSON object."""

    separator: str

    def read(self, text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        """See Body.read."""
        stop = text.find(self.separator or "{", at)
        name = text[at:stop].strip()
        if stop < 0 or not name or "\n" in name:
            raise Malformed("a call needs the name of a tool, and its arguments")
        value, stop = _decoded(text, stop + len(self.separator))
        return [ToolCall(name, _object(value, "arguments"))], stop


@dataclass(frozen=True)
class TagBody:
    """A name and its parameters; all parts are texts of the template.

    name, ``header``, then for each: ``begin``, its name, ``between``, its value, ``end``. The call
    is over with ``stop``.
    """

    header: str
    begin: str
    between: str
    end: str
    stop: str

    def read(self, text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        """See Body.read. A value is a text where the tool's schema says so, else JSON if it is."""
        begin = _marker(self.begin)
        following = f"{begin.pattern}|{_marker(self.stop).pattern}"
        header = _marker(self.header) if self.header.strip() else re.compile(f"(?={following})")
        found = header.search(text, at)
        name = text[at : found.start()].strip() if found else ""
        if found is None or not name or "\n" in name:
            raise Malformed("a call needs the name of a tool, and an end")
        between = _marker(self.between, of_value=True)
        end = re.compile(rf"{_marker(self.end, of_value=True).pattern}(?=\s*(?:{following}))")
        at, arguments, types = _spaces(text, found.end()), dict[str, Any](), _types(name, tools)
        while opened := begin.match(text, at):
            named = between.search(text, opened.end())
            key = text[opened.end() : named.start()].strip() if named else ""
            closed = end.search(text, named.end()) if named else None
            if named is None or closed is None or not key or "\n" in key:
                raise Malformed(f"a parameter of the call of {name!r} has no end")
            arguments[key] = _typed(text[named.end() : closed.start()], types.get(key))
            at = _spaces(text, closed.end())
        return [ToolCall(name, arguments)], at


@dataclass(frozen=True)
class CallForm:
    """How a template writes calls. ``begin`` is empty where a call is all of a turn's text.

    ``outer``: the texts around all calls of a turn. ``parallel``: a turn can have several calls.
    """

    begin: str
    end: str
    outer: tuple[str, str]
    body: Body
    parallel: bool

    @classmethod
    def derive(cls, shown: Shown) -> Self:
        """The form of a template. ValueError if it is unknown, or loses a part of a call."""
        text = shown([PROBE_CALL])
        start, stop, body = _json_in(text) or _tags_in(text)
        opened, closed = text[:start], text[stop:]
        between = _between(shown, opened, text[start:stop], closed)
        begin = opened if between is None else _common_end(opened, between).lstrip(">])")
        rest = "" if between is None else between.removesuffix(begin)
        end = closed if between is None else common_start(closed, rest)
        outer = (opened.removesuffix(begin).strip(), closed.removeprefix(end).strip())
        if isinstance(body, JsonBody) and not begin.strip():  # all of a turn's calls are a list
            begin, end = opened.strip().removesuffix("["), closed.strip().removeprefix("]")
            outer = ("", "")
        elif not begin.strip():
            raise ValueError(f"no text of the template stands before its calls: {text!r}")
        if isinstance(body, TagBody):  # the end of the last parameter is a part of the call's
            end = end.strip().removeprefix(body.end.strip())
            body = replace(body, stop=end)
        made = cls(begin.strip(), end.strip(), outer, body, between is not None)
        made._check(shown)
        return made

    def _check(self, shown: Shown) -> None:
        for calls in [
            (HARD_CALL,),
            (ToolCall(PROBE_CALL.name, {}),),
            *[(PROBE_CALL, HARD_CALL)] * self.parallel,
        ]:
            text = shown(calls)
            if (read := self.read(text, [PROBE_TOOL])) != Reading("", calls, ()):
                raise ValueError(f"a call that it writes as {text!r} is read as {read}")

    def read(self, text: str, tools: Tools = ()) -> Reading:
        """The calls of a turn's text, ``MAX_CALLS`` at most.

        ``tools``: their schemas, for values without types.
        """
        if not self.begin and not self._is_bare(text):
            return Reading(text.strip(), (), ())
        kept: list[str] = []
        calls: list[ToolCall] = []
        malformed: list[str] = []
        at, begin = 0, _marker(self.begin) if self.begin else re.compile(r"(?=[\[{])")
        while found := begin.search(text, at):
            room = MAX_CALLS - len(calls) - len(malformed)
            if room <= 0:
                malformed.append(TOO_MANY)
                break
            kept.append(text[at : found.start()])
            try:
                read, at = self._one(text, found.end(), tools)
                calls += read[:room]
                if len(read) > room:
                    malformed.append(TOO_MANY)
                    break
            except Malformed as error:
                malformed.append(str(error))
                at = self._behind(text, found.end())
                kept.append(text[found.start() : at])
        kept.append(text[at:])
        return Reading(self._content(kept, bool(calls)), tuple(calls), tuple(malformed))

    def _is_bare(self, text: str) -> bool:
        body = self.body
        named = isinstance(body, JsonBody) and f'"{body.name}"' in text
        return named and text.lstrip().startswith(("{", "["))

    def _one(self, text: str, at: int, tools: Tools) -> tuple[list[ToolCall], int]:
        calls, stop = self.body.read(text, at, tools)
        if not self.end:
            return calls, stop
        ended = _marker(self.end).match(text, _spaces(text, stop))
        if ended is None:
            raise Malformed(f"the call of {calls[0].name!r} has no end" if calls else "no call")
        return calls, ended.end()

    def _behind(self, text: str, inside: int) -> int:
        """The place at which reading goes on after a malformed call."""
        ended = _marker(self.end).search(text, inside) if self.end else None
        begun = _marker(self.begin).search(text, inside) if self.begin else None
        places = [*([ended.end()] if ended else []), *([begun.start()] if begun else [])]
        return min(places, default=len(text))

    def _content(self, kept: list[str], called: bool) -> str:
        text = "".join(kept)
        for mark in self.outer if called else ():
            text = text.replace(mark, "", 1) if mark else text
        return text.strip(" \n;,") if called and not self.begin else text.strip()


def _between(shown: Shown, opened: str, first: str, closed: str) -> str | None:
    """The text between two calls; None if the template shows no two."""
    try:
        second = shown([OTHER_CALL]).removeprefix(opened).removesuffix(closed)
        text = shown([PROBE_CALL, OTHER_CALL])
    except ValueError:
        return None
    if not text.startswith(opened + first) or not text.endswith(second + closed):
        return None
    return text.removeprefix(opened + first).removesuffix(second + closed)


def _json_in(text: str) -> tuple[int, int, Body] | None:
    """Start and end of the probe's call in a text, and its form, if that has JSON."""
    for at in (place for place, one in enumerate(text) if one == "{"):
        try:
            value, stop = _decoded(text, at)
        except Malformed:
            continue
        keys = {key for key, one in value.items() if one == PROBE_CALL.name}
        given = {key for key, one in value.items() if _equals(one)}
        if keys and given:
            return at, stop, JsonBody(keys.pop(), given.pop())
        named = text.rfind(PROBE_CALL.name, 0, at)
        if _equals(value) and named >= 0:
            return named, stop, NamedBody(text[named + len(PROBE_CALL.name) : at].strip())
    return None


def _equals(value: Any) -> bool:
    return bool(value == PROBE_CALL.arguments or value == json.dumps(PROBE_CALL.arguments))


def _tags_in(text: str) -> tuple[int, int, Body]:
    """The same, if it has tags. ValueError if it has none either."""
    words = [PROBE_CALL.name, *(word for pair in PROBE_CALL.arguments.items() for word in pair)]
    parts = re.fullmatch("(.*?)" + "(.*?)".join(words) + "(.*)", text, re.DOTALL)
    if parts is None:
        raise ValueError(f"the form of its calls is unknown: {text!r}")
    _, first, between, following, again, _ = parts.groups()
    begin = _common_end(first, following).lstrip(">])")
    if again != between or not (begin.strip() and between.strip()):
        raise ValueError(f"the form of its calls is unknown: {text!r}")
    header, end = first.removesuffix(begin), following.removesuffix(begin)
    return parts.end(1), parts.start(6), TagBody(header, begin, between, end, "")


def _common_end(one: str, other: str) -> str:
    return common_start(one[::-1], other[::-1])[::-1]


def common_start(one: str, other: str) -> str:
    """The beginning that two texts share."""
    pairs = zip(one, other, strict=False)
    return one[: sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))]


def _marker(text: str, of_value: bool = False) -> re.Pattern[str]:
    """Finds a template's text, with any white space inside of it and after it.

    ``of_value``: a value is beside it. Only the template's own white space is not the value's.
    """
    words = r"\s*".join(map(re.escape, text.split()))
    if not of_value:  # white space before it would be searched for at each of its characters
        return re.compile(words + r"\s*")
    lead, trail = text[: len(text) - len(text.lstrip())], text[len(text.rstrip()) :]
    return re.compile(f"(?:{re.escape(lead)})?{words}(?:{re.escape(trail)})?")


def _spaces(text: str, at: int) -> int:
    """The place behind the white space at a place."""
    found = SPACES.match(text, at)
    return found.end() if found else at


def _refuse(constant: str) -> Any:
    raise Malformed(f"{constant} is not JSON")


SPACES = re.compile(r"\s*")
DECODER = json.JSONDecoder(parse_constant=_refuse)


def _decoded(text: str, at: int) -> tuple[Any, int]:
    """The JSON value at a place, and the place behind it. Malformed."""
    try:
        value, stop = DECODER.raw_decode(text, _spaces(text, at))
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"the call is not JSON: {error}") from None
    if too_deep(value):
        raise Malformed(f"more than {MAX_DEPTH} values lie in each other")
    return value, stop


def _object(value: Any, key: str) -> dict[str, Any]:
    """The arguments of a call, which some forms write as a text. Malformed."""
    if isinstance(value, str):
        value, _ = _decoded(value, 0)
    if not isinstance(value, dict):
        raise Malformed(f"{key!r} of a call has to be a JSON object")
    return value


def _types(name: str, tools: Tools) -> dict[str, Any]:
    """The types of a tool's parameters, as far as its schema has them."""
    for tool in tools:
        function = tool.get("function", tool)
        if function.get("name") == name:
            parameters = function.get("parameters", {}).get("properties", {})
            return {key: one.get("type") for key, one in parameters.items()}
    return {}


def _typed(value: str, type_: Any) -> Any:
    if type_ == "string":
        return value
    try:
        decoded, stop = _decoded(value, 0)
    except Malformed:
        return {"True": True, "False": False, "None": None}.get(value.strip(), value)
    return value if value[stop:].strip() else decoded
