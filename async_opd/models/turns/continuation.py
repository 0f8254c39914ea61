"""The tokens that follow a sampled turn, computed from a template and never from the sampled text.

    history of probes, an answer ──template──► text A
    the same, and the new messages ──template──► text B ── without A's text up to the answer's end
        ──► end of the turn, new messages, generation prompt ──► tokens after the sampled ones

Sampled tokens stay as they are: they are not decoded and encoded. Texts of messages are encoded as
texts, also where they spell special tokens.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import takewhile
from typing import Any, Literal, NamedTuple

import numpy as np

from async_opd.core.environments import AssistantMessage, Message, ToolCall
from async_opd.core.row import kinds_of
from async_opd.core.sequence import Int32
from async_opd.models.chat_template import THOUGHT
from async_opd.models.special_tokens import MARK
from async_opd.models.tokenizer import Text
from async_opd.models.turns.calls import PROBE_CALL, PROBE_TOOL, CallForm, Tools, common_start

History = Literal["append", "template", "refuse"]
"""Where a template would change earlier tokens: they stay, are rendered again, or are refused."""
Case = Literal["kept", "changed", "not shown"]
CASES = {
    "tool result after a call": ("tool", False),
    "tool result after a thought and a call": ("tool", True),
    "user turn after an answer": ("user", False),
    "user turn after a thought and an answer": ("user", True),
}
GENERATION = "generation prompt and sampled text"
USER: Message = {"role": "user", "content": "zquser"}
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
NO_TEMPLATE = "episodes have chat messages, and the student has no chat template"
CHANNEL = "<|channel|>"
REMEDY = "set student.chat_template_file to a template that does"


class Following(NamedTuple):
    """A text that follows an answer: ``turn_end`` and all after it.

    ``kept``: the template leaves everything before it as it was sampled.
    """

    text: str
    turn_end: str
    kept: bool


class Turns:
    """How one model's template continues a chat. Its methods take bounded time."""

    def __init__(self, text: Text, history: History = "append") -> None:
        """``history``: the config's ``environment.history``. Raises what ``eos_ids`` raises."""
        self._text, self._history = text, history
        self._ends = frozenset(text.response_ends())

    def quoted(self, text: str) -> str:
        """An environment's text, to stand in a message of the data: special tokens stay text.

        ValueError as of ``Text.quoted``.
        """
        shown: str = _encodable(text)
        return self._text.quoted(shown) if self._text.parses else shown

    def opening(
        self, messages: Sequence[Message | AssistantMessage], tools: Tools = (), own: int = 0
    ) -> Int32:
        """Token ids of messages, with tools and a generation prompt; also of a whole history.

        With ``data.special_tokens: parse`` special tokens in the first ``own`` messages, those of
        the data, are tokens. ValueError as of ``Text.encode``.
        """
        if not self._text.chats:
            raise ValueError(NO_TEMPLATE)
        given = self._messages(messages)
        shown = [*given[:own], *map(_encodable, given[own:])]
        return np.array(self._text.encode(shown, tools, own), np.int32)

    rendered = opening

    def after(
        self, sampled: Int32, new: Sequence[Message], tools: Tools = (), thoughts: bool = False
    ) -> Int32 | None:
        """Token ids to append after those of a sampled turn, which ``new`` messages follow.

        The turn's end is among them as far as it was not sampled. ``thoughts``: whether an earlier
        turn of this context has a thought. None where the template changes
        what was sampled, or its context, unless ``history`` is append. ValueError if the template
        refuses the messages.
        """
        ids = [int(one) for one in sampled]
        if self._history != "append" and not thoughts:
            thoughts = bool(self._opened or THOUGHT.search(self._text.decode(ids, special=True)))
        shown = [*map(_encodable, self._messages(new))]
        if any(kind != "text" for kind in kinds_of(shown)):
            raise ValueError("messages after the first turn can have texts only, and no images")
        quoted, functions = self._text.quoted(shown), self._text.quoted([*tools])
        found = self._following(quoted, thoughts, functions)
        following = self._text.quoted_ids(found.text)
        reach = len(self._text.plain(found.turn_end)) + 1  # an end may open the next turn
        ends = (at for at, one in enumerate(following[:reach]) if one in self._ends)
        end, last = next(ends, -1) + 1, ids[-1] if ids else None
        if self._history != "append":
            exact = ids[-end:] == following[:end] if end else False
            if not found.kept or (last in self._ends and not exact):
                return None
        closed = end > 0 and last == following[end - 1]
        return np.array(following[end:] if closed else following, np.int32)

    def parse(self, sampled: Int32, tools: Tools = ()) -> AssistantMessage:
        """The message of a sampled turn; any tokens have one. ``tools``: schemas of the calls'.

        ValueError only for a broken tokenizer.
        """
        ids = [int(one) for one in sampled]
        while ids and ids[-1] in self._ends:
            ids.pop()
        thought, text = _divided(self._text.decode(ids, special=True), self._opened)
        if isinstance(self._form, str):
            return AssistantMessage(text.strip(), thought)
        content, calls, malformed = self._form.read(text, tools)
        return AssistantMessage(content, thought, calls, malformed)

    def cases(self, tools: bool) -> dict[str, Case]:
        """Whether the template keeps a history that grows, by case; ``tools``: the episode has."""
        given = [PROBE_TOOL] if tools else []
        found = {name: self._case(role, thought, given) for name, (role, thought) in CASES.items()}
        return found | {GENERATION: self._generated(given)}

    def fault(self, tools: bool) -> tuple[str, str] | None:
        """Why episodes cannot have this template, and a remedy; ``tools``: they have tools."""
        if not self._text.chats:
            return NO_TEMPLATE, REMEDY
        try:
            return self._fault(tools, self._text.chat.place)
        except ValueError as error:
            return str(error), REMEDY

    def _fault(self, tools: bool, place: str) -> tuple[str, str] | None:
        cases, role = self.cases(tools), "tool" if tools else "user"
        if tools and (cause := self._tool_fault(cases)):
            return f"{place} {cause}", f"{REMEDY}, or take an environment without tools"
        if cases["user turn after an answer"] == "not shown" and not tools:
            return f"{place} shows no user's turn after an answer", REMEDY
        new = [_reply(role)]
        once, twice = (self._following(new, False, [], turns) for turns in (1, 2))
        if once.text != twice.text:
            cause = (
                f"writes another text after the second answer than after the first: {once.text!r}"
            )
            return f"{place} {cause}, then {twice.text!r}", REMEDY
        changed = [name for name, case in cases.items() if case == "changed" and role in name]
        if self._history == "refuse" and changed:
            cause = f"refuse: {place} changes earlier tokens ({', '.join(changed)})"
            return cause, "set environment.history to append or template, or take another template"
        return None

    def _tool_fault(self, cases: dict[str, Case]) -> str:
        if PROBE_CALL.name not in self._render([USER], [PROBE_TOOL]):
            return "does not show tools"
        if cases["tool result after a call"] == "not shown":
            return "does not show a call, or the result of one"
        if CHANNEL in str(self._text.template):
            return f"writes turns in channels ({CHANNEL}), which are not read"
        if isinstance(self._form, str):
            return f"shows calls in a form that is not read: {self._form}"
        return ""

    def _case(self, role: str, thought: bool, tools: Tools) -> Case:
        new = _reply(role)
        try:
            found = self._following([new], thought, tools)
            shown = self._render(
                [USER, _probe([PROBE_CALL.name] * (role == "tool"), thought, 2)], tools, False
            )
        except ValueError:
            return "not shown"
        if new["content"] not in found.text or (thought and "zqthought2" not in shown):
            return "not shown"
        return "kept" if found.kept else "changed"

    def _generated(self, tools: Tools) -> Case:
        answer = _probe([], bool(self._opened), 1)
        try:
            begun = self._render([USER], tools)
            text = self._render([USER, answer], tools, False)
        except ValueError:
            return "not shown"
        whole = text.removeprefix(begun)[: -len(self._turn_end) or None]
        kept = text.startswith(begun) and _is_sampled(whole, answer)
        return "kept" if kept else "changed"

    def _following(
        self, new: Sequence[Message], thought: bool, tools: Tools, turns: int = 2
    ) -> Following:
        """The text behind an answer when quoted messages come after it. ValueError."""
        results = list(takewhile(lambda one: one.get("role") == "tool", new))
        names = [str(one.get("name") or PROBE_CALL.name) for one in results]
        if isinstance(self._form, str) or not self._form.parallel:
            names = names[:1]
        first, last = (_probe(names, thought, number) for number in (1, 2))
        replies = [_reply("tool", name, "zqearlier") for name in names]
        earlier: list[Message | AssistantMessage] = [USER]
        if turns == 2:
            earlier += [first, *(replies or [_reply("user", content="zqearlier")])]
        begun = self._render(earlier, tools)
        alone = self._render([*earlier, last], tools, False)
        whole = self._render([*earlier, last, *new], tools)
        mark = str(last.calls[-1].arguments["zqone"]) if last.calls else last.content
        turn_end = alone[_behind(alone, mark) :]
        at = _behind(whole, mark)
        call_end = self._call_end(turn_end) if names else ""
        if not whole.startswith(call_end, at):
            raise ValueError(f"{self._text.chat.place} changes a call when a result follows it")
        kept = whole.startswith(begun) and _is_sampled(whole[len(begun) : at], last)
        return Following(whole[at + len(call_end) :], turn_end[len(call_end) :], kept)

    def _call_end(self, text: str) -> str:
        """The rest of a call without the end of its turn."""
        if text.endswith(self._turn_end):
            return text[: len(text) - len(self._turn_end)]
        ends = filter(None, (self._text.decode([one], special=True) for one in self._ends))
        return text[: min((at for at in map(text.find, ends) if at >= 0), default=len(text))]

    @cached_property
    def _turn_end(self) -> str:
        """The text after an answer without calls."""
        answer = _probe([], False, 1)
        text = self._render([USER, answer], (), False)
        return text[_behind(text, answer.content) :]

    @cached_property
    def _form(self) -> CallForm | str:
        """The form of calls; or why it is unknown."""
        try:
            return CallForm.derive(lambda calls: self._shown(calls, self._as_json))
        except Exception as error:  # a template can raise anything
            return str(error)

    @cached_property
    def _as_json(self) -> bool:
        """Whether the template takes the arguments of calls as a text only."""
        try:
            return str(PROBE_CALL.arguments) in self._shown([PROBE_CALL], False)  # as Python has it
        except ValueError:
            return True

    def _shown(self, calls: Sequence[ToolCall], as_json: bool) -> str:
        """The text that the template makes of calls, without header and end of the turn."""
        answer = _probe([], False, 1)
        plain = self._render([USER, answer], [PROBE_TOOL], False)
        header = plain[: plain.find(answer.content)]
        message = _message(AssistantMessage("", calls=tuple(calls)), as_json)
        for call in message["tool_calls"]:
            call["id"] = _call_id(0)  # calls differ in nothing but themselves
        text = self._render([USER, message], [PROBE_TOOL], False)
        return self._call_end(text[len(common_start(header, text)) :])

    @cached_property
    def _opened(self) -> str:
        """The end of the thought that the generation prompt has begun; empty without one."""
        chat = self._text.chat
        opening = chat.opening if chat.prefix is None else chat.prefix
        found = THOUGHT.search(opening)
        closing = _closing(found[0]) if found else ""
        return "" if closing in opening else closing

    def _render(
        self, messages: Sequence[Message | AssistantMessage], tools: Tools, generate: bool = True
    ) -> str:
        chat = self._text.chat
        given = chat.with_system(self._messages(messages))
        return chat.render(given, generate, [*tools])

    def _messages(self, messages: Sequence[Message | AssistantMessage]) -> list[Message]:
        """Chat messages as templates take them, with ids of calls and of their results."""
        made: list[Message] = []
        results = 0
        for one in messages:
            if isinstance(one, AssistantMessage):
                one = _message(one, bool(one.calls) and self._as_json)
            results = results + 1 if one.get("role") == "tool" else 0
            made.append({"tool_call_id": _call_id(results - 1), **one} if results else one)
        return made


def _probe(names: Sequence[str], thought: bool, number: int) -> AssistantMessage:
    calls = (
        ToolCall(name, {"zqone": f"zqvalue{number}x{place}z"}) for place, name in enumerate(names)
    )
    content = "" if names else f"zqanswer{number}z"
    return AssistantMessage(content, f"zqthought{number}" if thought else "", tuple(calls))


def _reply(role: str, name: str = PROBE_CALL.name, content: str = "zqreply") -> Message:
    named = {"name": name} if role == "tool" else {}
    return {"role": role, **named, "content": content}


def _behind(text: str, mark: str) -> int:
    """The place behind a mark. ValueError if the text does not have it."""
    if mark not in text:
        raise ValueError("the chat template does not show an answer, or a call")
    return text.index(mark) + len(mark)


def _is_sampled(text: str, probe: AssistantMessage) -> bool:
    """Whether a template's text of a turn is one that a model can sample for it."""
    if probe.thought:
        return probe.thought in text
    return not THOUGHT.search(text) and (bool(probe.calls) or text.lstrip() == probe.content)


def _call_id(number: int) -> str:
    return f"call{number:05d}"


def _message(one: AssistantMessage, as_json: bool) -> Message:
    """A chat message of a turn; ``as_json``: arguments of calls as a text."""
    made: Message = {"role": "assistant", "content": one.content}
    if one.thought:
        made |= dict.fromkeys(THOUGHT_KEYS, one.thought)
    calls = [
        {
            "type": "function",
            "id": _call_id(number),
            "function": {
                "name": call.name,
                "arguments": json.dumps(call.arguments) if as_json else call.arguments,
            },
        }
        for number, call in enumerate(one.calls)
    ]
    return made | ({"tool_calls": calls} if calls else {})


def _encodable(value: Any) -> Any:
    """The same with texts that a tokenizer takes: no halves of characters, and no MARK."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode().replace(MARK, "\ufffd")
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return list(map(_encodable, value)) if isinstance(value, list | tuple) else value


def _closing(opened: str) -> str:
    """The end of a thought that begins so."""
    return f"{opened[0]}/{opened[1:]}"


def _divided(text: str, closing: str) -> tuple[str, str]:
    """Thought and other text of a turn; ``closing``: of a thought that was begun before it."""
    begun = THOUGHT.match(text.lstrip())
    if begun:
        text, closing = text.lstrip()[begun.end() :], _closing(begun[0])
    if not closing:
        return "", text
    thought, _, text = text.partition(closing)
    return thought.strip(), text
