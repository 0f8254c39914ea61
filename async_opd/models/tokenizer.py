"""Text and token ids: the student's tokenizer and chat template, without transformers.

Loaded once, in the driver. Tested to agree with transformers' AutoTokenizer.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from jinja2 import Template, TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from async_opd.core.nesting import MAX_DEPTH, too_deep
from async_opd.core.row import PromptText
from async_opd.models.special_tokens import MARK, SpecialTokens

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig

SPECIAL_TOKENS = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


class Text:
    """Encodes prompts and decodes responses with the files of a model directory."""

    def __init__(
        self,
        model_dir: str | Path,
        chat_template: Literal["auto", "always", "never"] = "auto",
        special_tokens: Literal["text", "parse"] = "text",
    ) -> None:
        """``special_tokens``: how those are read that prompts spell, as in the config."""
        self._dir = Path(model_dir)
        file = self._dir / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises the bare class
            raise ValueError(f"{file} is no tokenizer: {error}") from error
        self._tokenizer.no_truncation()  # both may be stored in the file, and are not for prompts
        self._tokenizer.no_padding()
        self._mode, self._parse = chat_template, special_tokens == "parse"

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """Of a run's student, as its data is to be read."""
        return cls(config.student.model, config.data.chat_template, config.data.special_tokens)

    def encode(self, prompt: PromptText) -> list[int]:
        """Token ids of a prompt.

        ValueError for chat messages without a chat template, and for a special token in the text
        that cannot be read as text.
        """
        if isinstance(prompt, str) and (self._mode == "never" or self.template is None):
            if self._mode == "always":
                raise ValueError(f"data.chat_template is always, but {self._dir} has none")
            return self._encoded(prompt)
        if self.template is None or self._mode == "never":
            raise ValueError(
                f"the prompt is a list of chat messages, but {self._dir} has no chat template, or "
                "data.chat_template is never"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        if self._parse:
            return self.plain(self._render(messages))
        rendered = self._render(self._special.quoted(messages))
        return self._special.encode(rendered, add_special_tokens=False)

    def _encoded(self, prompt: str) -> list[int]:
        """A prompt that is no chat."""
        if self._parse:
            return list(self._tokenizer.encode(prompt).ids)
        return self._special.encode(self._special.quoted(prompt))

    def spelled(self, prompt: PromptText) -> str | None:
        """A special token that the prompt spells and that is read as text, if there is one."""
        return None if self._parse else self._special.found(prompt)

    def plain(self, text: str) -> list[int]:
        """Token ids of the text alone: no template, no special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of a response, special tokens left out."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def turn_end(self) -> int | None:
        """The token that ends an assistant's turn: the first special one that follows its text.

        None where prompts have no template, or it has no such token, or refuses these messages.
        """
        said = "forty-two"
        turns = [{"role": "user", "content": "6 * 7"}, {"role": "assistant", "content": said}]
        try:
            if self.template is None or self._mode == "never":
                return None
            _, found, after = self._render(turns, answer=False).rpartition(said)
        except Exception:  # its file may be broken, a template raise anything: prompts will tell
            return None
        known = self._tokenizer.get_added_tokens_decoder() if found else {}
        return next((one for one in self.plain(after) if one in known), None)

    def response_ends(self) -> tuple[int, ...]:
        """Tokens that end a response: the model's own, and the one that ends an assistant's turn.

        A base model often has a template whose end of a turn its ``generation_config.json`` lacks.
        Raises what ``eos_ids`` raises.
        """
        own, turn = eos_ids(self._dir), self.turn_end()
        return own if turn is None or turn in own else (*own, turn)

    @property
    def size(self) -> int:
        """Tokens of the vocabulary, added ones included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def template(self) -> str | None:
        """The chat template, if the model has one."""
        file = self._dir / "chat_template.jinja"
        if file.is_file():
            return file.read_text(encoding="utf-8")
        template = read_json(self._dir / "tokenizer_config.json").get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        return template

    @cached_property
    def _compiled(self) -> Template:
        """The chat template, in the environment that transformers gives it."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.globals |= {"raise_exception": _raise, "strftime_now": _strftime_now}
        environment.filters["tojson"] = _tojson
        return environment.from_string(str(self.template))

    @cached_property
    def _named(self) -> dict[str, str]:
        """Special tokens by their names in templates."""
        config = read_json(self._dir / "tokenizer_config.json")
        contents = {name: _content(config.get(name)) for name in SPECIAL_TOKENS}
        return {name: text for name, text in contents.items() if text is not None}

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self._tokenizer, self._named.values())

    def _render(self, messages: list[dict[str, Any]], answer: bool = True) -> str:
        """``answer``: the beginning of an assistant's turn follows on them."""
        try:
            return self._compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=answer,
                **self._named,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template of {self._dir} fails: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or an empty one if there is no such file. ValueError, OSError."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply") from None
    if too_deep(value):
        raise ValueError(f"{file} is nested too deeply: more than {MAX_DEPTH} values")
    return value if isinstance(value, dict) else {}


def eos_ids(model_dir: str | Path) -> tuple[int, ...]:
    """Tokens that end a response: generation_config.json, else config.json.

    ValueError or TypeError for what is no token.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(Path(model_dir) / name).get("eos_token_id")
        if value is not None:
            return tuple(int(one) for one in (value if isinstance(value, list) else [value]))
    return ()


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


class _Generation(Extension):
    """``{% generation %}`` marks what an assistant said; here it is just its contents."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _strftime_now(format: str) -> str:  # noqa: A002
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers': without HTML's escapes. A MARK stays a character that is dropped later."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return text.replace(json.dumps(MARK)[1:-1], MARK)


def _raise(message: str) -> None:
    raise ValueError(f"the chat template refuses these messages: {message}")
