"""Text and token ids: the student's tokenizer and chat template, without transformers.

The driver loads it once. Tests compare it with transformers' AutoTokenizer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
        """``special_tokens``: the config's key ``data.special_tokens``. ValueError."""
        self._dir = Path(model_dir)
        file = self._dir / "tokenizer.json"
        try:
            self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises the bare class
            raise ValueError(f"{file} is no tokenizer: {error}") from error
        self._tokenizer.no_truncation()  # the file may ask for truncation and padding, which
        self._tokenizer.no_padding()  # would change prompts
        self._mode, self._parse = chat_template, special_tokens == "parse"

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The student's tokenizer, with the settings of the run's data. ValueError."""
        return cls(config.student.model, config.data.chat_template, config.data.special_tokens)

    def encode(self, prompt: PromptText) -> list[int]:
        """Token ids of a prompt.

        ValueError for chat messages without a chat template, and for a special token in the text
        that the tokenizer cannot read as text.
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
        """Token ids of a prompt without a chat template."""
        if self._parse:
            return list(self._tokenizer.encode(prompt).ids)
        return self._special.encode(self._special.quoted(prompt))

    def spelled(self, prompt: PromptText) -> str | None:
        """The first special token that the prompt spells and that is read as text, if any."""
        return None if self._parse else self._special.found(prompt)

    def plain(self, text: str) -> list[int]:
        """Token ids of the text alone, without template and without added special tokens."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Text of a response, without special tokens."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def token(self, token: int) -> str:
        """Text of one token as it stands within a text, with its leading space.

        Of part of a character, and of a special token, its name in the vocabulary.
        """
        once, twice = (
            str(self._tokenizer.decode([token] * n, skip_special_tokens=True)) for n in (1, 2)
        )
        text = twice[len(once) :]  # a decoder may strip the space before the first token
        named = not text or "\ufffd" in text
        return str(self._tokenizer.id_to_token(token) or f"⟨{token}⟩") if named else text

    def turn_end(self) -> int | None:
        """The token that ends an assistant's turn: the first special one that follows its text.

        None if prompts have no template, or the template has no such token or refuses the probe.
        """
        answer = "forty-two"
        probe = [{"role": "user", "content": "6 * 7"}, {"role": "assistant", "content": answer}]
        try:
            if self.template is None or self._mode == "never":
                return None
            _, found, after = self._render(probe, generate=False).rpartition(answer)
        except Exception:  # a broken file or template fails again, and is reported, with a prompt
            return None
        special = self._tokenizer.get_added_tokens_decoder() if found else {}
        return next((one for one in self.plain(after) if one in special), None)

    def response_ends(self) -> tuple[int, ...]:
        """Tokens that end a response: the model's own, and the one that ends an assistant's turn.

        The ``generation_config.json`` of a base model often lacks the end of its template's turns.
        Raises what ``eos_ids`` raises.
        """
        own, turn = eos_ids(self._dir), self.turn_end()
        return own if turn is None or turn in own else (*own, turn)

    @property
    def size(self) -> int:
        """Number of tokens in the vocabulary, with added ones."""
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
        """The chat template, compiled in the same environment as in transformers."""
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
        """The texts of special tokens, by their names in templates."""
        config = read_json(self._dir / "tokenizer_config.json")
        contents = {name: _content(config.get(name)) for name in SPECIAL_TOKENS}
        return {name: text for name, text in contents.items() if text is not None}

    @cached_property
    def _special(self) -> SpecialTokens:
        return SpecialTokens(self._tokenizer, self._named.values())

    def _render(self, messages: list[dict[str, Any]], generate: bool = True) -> str:
        """The rendered messages; ``generate`` adds the beginning of an assistant's turn."""
        try:
            return self._compiled.render(
                messages=messages,
                tools=None,
                documents=None,
                add_generation_prompt=generate,
                **self._named,
            )
        except TemplateError as error:
            raise ValueError(f"the chat template of {self._dir} fails: {error}") from error


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one if there is no file. ValueError, OSError."""
    if not file.is_file():
        return {}
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except RecursionError:
        raise ValueError(f"{file} is nested too deeply") from None
    if too_deep(value):
        raise ValueError(f"{file} is nested too deeply: more than {MAX_DEPTH} values")
    return value if isinstance(value, dict) else {}


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a config.json's language model, which may lie in its ``text_config``."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def eos_ids(model_dir: str | Path) -> tuple[int, ...]:
    """Tokens that end a response, by generation_config.json or else config.json.

    ValueError or TypeError if the value is no token.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(Path(model_dir) / name).get("eos_token_id")
        if value is not None:
            return tuple(int(one) for one in (value if isinstance(value, list) else [value]))
    return ()


def _content(token: Any) -> str | None:
    return token.get("content") if isinstance(token, dict) else token


class _Generation(Extension):
    """Accepts ``{% generation %}`` blocks around an assistant's text, and renders the text."""

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
    """JSON without HTML escapes, as in transformers."""
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return text.replace(json.dumps(MARK)[1:-1], MARK)  # an escaped MARK would not be dropped


def _raise(message: str) -> None:
    raise ValueError(f"the chat template refuses these messages: {message}")
