"""Chat templates: from messages to the text that a model reads, without transformers.

    messages ──system prompt──► template(messages, values) ──response prefix──► text

The opening is what the generation prompt holds of a thought (``<think>``) after the header of the
assistant's turn. It is a part of the turn that the response continues, and so a teacher has to read
the one that the student's response was sampled after.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from async_opd.models.json_files import read_json
from async_opd.models.special_tokens import MARK

SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)
RESERVED = ("messages", "add_generation_prompt", *SPECIAL_TOKENS)
"""Variables of templates that ``chat_template_kwargs`` may not set."""
MAX_CHARACTERS = 1 << 20
"""Of a template's file."""
DATED = "strftime_now"
"""The function of templates that gives the present date."""
THOUGHT = re.compile(r"<(?:think|thinking|thought|reasoning|seed:think)>|\[THINK\]")
PROBED = "6 * 7"
PROBE = [{"role": "user", "content": PROBED}]
PARTS_PROBE = [{"role": "user", "content": [{"type": "text", "text": PROBED}]}]


@dataclass(frozen=True)
class ChatTemplate:
    """A chat template, and what it is rendered with.

    ``folder`` is the model's directory: its template, and the texts of special tokens in it.
    ``file`` is a template in place of the model's. ``values`` are further variables, ``system`` is
    the system message of all prompts, ``prefix`` replaces the opening of the generation prompt.
    ``date``, as 2026-11-22, is what the template reads as the present one; None: today.
    """

    folder: Path
    file: Path | None = None
    values: Mapping[str, Any] = field(default_factory=dict)
    system: str | None = None
    prefix: str | None = None
    date: str | None = None

    @cached_property
    def text(self) -> str | None:
        """The template, if there is one. OSError, ValueError."""
        if self.file is not None:
            return _text(self.file)
        file = self.folder / "chat_template.jinja"
        if file.is_file():
            return _text(file)
        template = read_json(self.folder / "tokenizer_config.json").get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template

    @cached_property
    def named(self) -> dict[str, str]:
        """The texts of special tokens, by their names in templates."""
        config = read_json(self.folder / "tokenizer_config.json")
        contents = {name: _content(config.get(name)) for name in SPECIAL_TOKENS}
        return {name: text for name, text in contents.items() if text is not None}

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that the template reads. ValueError if it is not a template."""
        try:
            names = _environment(self.date).parse(str(self.text)).find_all(nodes.Name)
        except TemplateError as error:
            raise ValueError(f"{self.place} is not a chat template: {error}") from error
        return frozenset(name.name for name in names if name.ctx == "load")

    @property
    def place(self) -> str:
        """Where the template is, for messages."""
        return str(self.file or f"the chat template of {self.folder}")

    @cached_property
    def opening(self) -> str:
        """The beginning of a thought at the end of the generation prompt; empty without one.

        It is that of a probe. ValueError if the template refuses it.
        """
        probe = self._shaped(PROBE)
        begun, whole = self._rendered(probe, False), self._rendered(probe, True)
        equal = takewhile(lambda pair: pair[0] == pair[1], zip(begun, whole, strict=False))
        added = whole[sum(1 for _ in equal) :]
        thought = THOUGHT.search(added)
        return added[thought.start() :] if thought else ""

    def with_system(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with ``system`` in place of theirs, if there is one."""
        if self.system is None:
            return messages
        own = bool(messages) and messages[0].get("role") in ("system", "developer")
        return [{"role": "system", "content": self.system}, *messages[own:]]

    def render(
        self,
        messages: list[dict[str, Any]],
        generate: bool = True,
        tools: Sequence[dict[str, Any]] = (),
    ) -> str:
        """The rendered messages; ``generate`` adds the beginning of an assistant's turn.

        ``tools`` are JSON schemas of functions, before those of ``values``. ValueError if the
        template refuses them.
        """
        text = self._rendered(self._shaped(messages), generate, tools)
        if not generate or self.prefix is None:
            return text
        if not text.endswith(self.opening):
            raise ValueError(
                f"{self.place} does not end this prompt with {self.opening!r} as others: its "
                "beginning of a response cannot be replaced"
            )
        return text[: len(text) - len(self.opening)] + self.prefix

    @cached_property
    def content(self) -> Literal["any", "text", "parts"]:
        """The contents of messages whose text the template shows: a text, parts, or any."""
        text, parts = self._shows(PROBE), self._shows(PARTS_PROBE)
        return "any" if text == parts else "text" if text else "parts"

    def _shows(self, probe: list[dict[str, Any]]) -> bool:
        try:
            text = self._rendered(probe, False)
        except Exception:  # a broken template fails again, and is reported, with a prompt
            return False
        return PROBED in text and not re.search("[\"']text[\"']", text)  # a list as it is

    def _shaped(self, messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """The messages with contents that the template shows, as far as they are texts."""
        if self.content == "any":
            return messages
        return list(map(_as_text if self.content == "text" else _as_parts, messages))

    @cached_property
    def _compiled(self) -> Template:
        """The chat template, compiled in the same environment as in transformers."""
        return _environment(self.date).from_string(str(self.text))

    def _rendered(
        self, messages: list[dict[str, Any]], generate: bool, tools: Sequence[dict[str, Any]] = ()
    ) -> str:
        values = {"tools": None, "documents": None, **self.values, **self.named}
        if tools:
            values["tools"] = list(tools)
        try:
            return self._compiled.render(
                messages=messages, add_generation_prompt=generate, **values
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(f"{self.place} fails: {error}") from error


def aligned_prefix(student: ChatTemplate, teacher: ChatTemplate) -> str | None:
    """The prefix with which a teacher's prompt ends as the student's; None: the teacher's own.

    Whether the response continues a thought must be the same for both. ValueError if the teacher
    closes the thought that the student's response continues, or a template refuses a probe.
    """
    if student.prefix:
        return student.prefix
    begun, own = student.opening if student.prefix is None else "", teacher.opening
    if _continues(begun):
        if own and not _continues(own):
            raise ValueError(
                f"the student's response continues the thought {begun!r}, which the teacher's "
                f"prompt has closed: {own!r}"
            )
        return begun
    if _continues(own):  # the student thinks by itself, or not at all
        return begun
    closes = bool(begun) and not own and begun.split(">")[0] in str(teacher.text)
    return begun if closes else None


def _continues(opening: str) -> bool:
    """Whether an opening leaves its thought open."""
    thought = THOUGHT.search(opening)
    return thought is not None and f"{thought[0][0]}/{thought[0][1:]}" not in opening


def _text(file: Path) -> str:
    """The content of a template's file. OSError for a pipe, a device, or more than a template."""
    if not file.is_file():
        raise OSError(f"{file} does not exist, or is not a regular file")
    with file.open(encoding="utf-8") as opened:
        text = opened.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise OSError(f"{file} has more than {MAX_CHARACTERS} characters")
    return text


def _as_parts(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose text is a part."""
    content = message.get("content")
    text = isinstance(content, str)
    return {**message, "content": [{"type": "text", "text": content}]} if text else message


def _as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose parts are one text, if all of them are texts."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    texts = [part.get("text") for part in parts if isinstance(part, dict)]
    if not parts or len(texts) < len(parts) or not all(isinstance(one, str) for one in texts):
        return message
    return {**message, "content": "".join(map(str, texts))}


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


class _Generation(Extension):
    """Accepts ``{% generation %}`` blocks around an assistant's text, and renders the text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, as in transformers."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return text.replace(json.dumps(MARK)[1:-1], MARK)  # an escaped MARK would not be dropped


def _raise(message: str) -> None:
    raise ValueError(f"the chat template refuses these messages: {message}")


def _environment(date: str | None) -> ImmutableSandboxedEnvironment:
    def strftime_now(format: str) -> str:  # noqa: A002
        now = datetime.now() if date is None else datetime.fromisoformat(date)
        return now.strftime(format)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.globals |= {"raise_exception": _raise, DATED: strftime_now}
    environment.filters["tojson"] = _tojson
    return environment
