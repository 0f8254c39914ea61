"""Text and token ids: the student's tokenizer and chat template, without transformers.

The driver loads it once. Tests compare it with transformers' AutoTokenizer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from tokenizers import Tokenizer

from async_opd.core.row import Media, PromptText, kinds_of
from async_opd.models.chat_template import PARTS_PROBE, ChatTemplate, aligned_prefix
from async_opd.models.json_files import read_json
from async_opd.models.processor import ImageProcessor
from async_opd.models.special_tokens import SpecialTokens, encoded, no_panic

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig
    from async_opd.config.sections.section import Rendering

PLACEHOLDERS = ("image_token_id", "image_token_index", "boi_token_id", "boi_token_index")
"""Settings of a config.json: one of them is the token that a template writes for an image."""
NO_IMAGES = f"its config.json has none of {', '.join(PLACEHOLDERS)}"
NOT_TEXT = re.compile(r"(image|video|audio|vision|boi|eoi)\w*_token_(id|index)")
"""Settings of a config.json whose tokens stand for more than text."""
IMAGE_PROBE = [{"role": "user", "content": [{"type": "image"}, *PARTS_PROBE[0]["content"]]}]


class Text:
    """Encodes prompts and decodes responses with the files of a model directory."""

    def __init__(
        self,
        model_dir: str | Path,
        chat_template: Literal["auto", "always", "never"] = "auto",
        special_tokens: Literal["text", "parse"] = "text",
        chat: ChatTemplate | None = None,
        processor: Callable[[], ImageProcessor] | None = None,
    ) -> None:
        """``special_tokens``: the config's key ``data.special_tokens``. ValueError.

        ``chat``: the template of prompts, by default the model's own. ``processor`` loads the
        model's image processor, which only lengths of prompts with images need.
        """
        self._dir, self._load_processor = Path(model_dir), processor
        self.chat = chat or ChatTemplate(self._dir)
        file = self._dir / "tokenizer.json"
        if not self._dir.is_absolute():  # a folder of that name is another model
            raise ValueError(f"{self._dir} is a model of a hub, whose files are not here")
        try:
            with no_panic():
                self._tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # tokenizers raises the bare class
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        self._tokenizer.no_truncation()  # the file may ask for truncation and padding, which
        self._tokenizer.no_padding()  # would change prompts
        self._mode, self.parses = chat_template, special_tokens == "parse"

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The student's tokenizer, with the settings of the run's data. ValueError."""
        data, folder = config.data, Path(config.student.model)
        chat = chat_of(config.student, folder, data.template_date)
        processor = partial(
            ImageProcessor.load,
            config.student.model,
            trust_remote_code=config.student.trust_remote_code,
            processor_kwargs=config.student.processor_kwargs,
        )
        return cls(folder, data.chat_template, data.special_tokens, chat, processor)

    def of_teacher(self, config: RunConfig, name: str) -> Self:
        """How a teacher reads prompts, with this tokenizer, which is the student's.

        ValueError where its prompts cannot end as the student's do; OSError.
        """
        if not config.teachers[name].renders:
            return self
        own = self.chat_of_teacher(config, name)
        if own.prefix is None and self._mode != "never":
            own = replace(own, prefix=aligned_prefix(self.chat, own))
        made = copy.copy(self)
        made.chat = own
        made.__dict__.pop("_special", None)
        return made

    def chat_of_teacher(self, config: RunConfig, name: str) -> ChatTemplate:
        """A teacher's template; keys that its section lacks are the student's. ValueError."""
        teacher = config.teachers[name]
        values, system = teacher.chat_template_kwargs, teacher.system_prompt or self.chat.system
        if teacher.own_template:
            model = config.template_model(name)
            if model is None:
                cause = f"teachers.{name} has own_template, but names no model that has a template"
                raise ValueError(f"{cause}: set teachers.{name}.model")
            own = chat_of(teacher, Path(model), self.chat.date)
            return replace(own, system=system)
        file = teacher.chat_template_file
        return ChatTemplate(
            self.chat.folder,
            self.chat.file if file is None else Path(file),
            (self.chat.values if file is None else {}) if values is None else values,
            system,
            teacher.response_prefix,
            self.chat.date,
        )

    def encode(
        self, prompt: PromptText, tools: Sequence[dict[str, Any]] = (), own: int | None = None
    ) -> list[int]:
        """Token ids of a prompt, with the JSON schemas of its tools.

        ``own``: how many of its messages, the first ones, are the data's, to which alone
        ``data.special_tokens`` applies; in others special tokens are text. None: all of them.
        They have one placeholder an image. ValueError for chat messages without a chat template,
        for a special token in the text that the tokenizer cannot read as text, for other media than
        images, and where images and placeholders differ in number.
        """
        kinds = [kind for kind in kinds_of(prompt) if kind != "text"]
        if others := {*kinds} - {"image", "image_url"}:
            raise ValueError(f"the prompt has parts of type {min(others)}: only images are read")
        if self.placeholder is None:
            if kinds:
                raise ValueError(f"the prompt has images, and {self._dir} reads none: {NO_IMAGES}")
            return self._ids(prompt, tools, own)
        ids = self._ids(prompt, tools, own)
        if (places := ids.count(self.placeholder)) != len(kinds):
            token = self._tokenizer.id_to_token(self.placeholder)
            raise ValueError(
                f"the prompt has {len(kinds)} images, and {token!r} {places} times: the chat "
                "template has to write it once for each image, and no text may have it"
            )
        return ids

    def _ids(
        self, prompt: PromptText, tools: Sequence[dict[str, Any]], own: int | None
    ) -> list[int]:
        """Token ids of a prompt whose parts are texts and images."""
        if isinstance(prompt, str) and (self._mode == "never" or self.template is None):
            if self._mode == "always":
                raise ValueError(f"data.chat_template is always, but {self._dir} has none")
            return self._encoded(prompt)
        if not self.chats:
            raise ValueError(
                f"the prompt is a list of chat messages, but {self._dir} has no chat template, or "
                "data.chat_template is never"
            )
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        given = len(messages)
        messages = self.chat.with_system(messages)
        if self.parses and own is None:
            return self.plain(self.chat.render(messages, tools=tools))
        parsed = own + len(messages) - given if self.parses and own else 0
        shown = [*messages[:parsed], *self.quoted(messages[parsed:])]
        return self.quoted_ids(self.chat.render(shown, tools=self.quoted([*tools])))

    def _encoded(self, prompt: str) -> list[int]:
        """Token ids of a prompt without a chat template."""
        if self.parses:
            return encoded(self._tokenizer, prompt)
        return self._special.encode(self._special.quoted(prompt))

    def quoted(self, value: Any) -> Any:
        """The text, or the messages, whose special tokens ``quoted_ids`` reads as text.

        ValueError for text in which they cannot be found.
        """
        return self._special.quoted(value)

    def quoted_ids(self, rendered: str) -> list[int]:
        """Token ids of what a template makes of quoted messages. ValueError as of ``encode``."""
        return self._special.encode(rendered, add_special_tokens=False)

    def spelled(self, prompt: PromptText) -> str | None:
        """The first special token that the prompt spells and that is read as text, if any."""
        return None if self.parses else self._special.found(prompt)

    def plain(self, text: str) -> list[int]:
        """Token ids of the text alone, without template and without added special tokens."""
        return encoded(self._tokenizer, text, add_special_tokens=False)

    def pieces(self, ids: Sequence[int]) -> list[str]:
        """The text of each token alone, special ones included. ValueError."""
        with no_panic():
            return [str(self._tokenizer.decode([one], skip_special_tokens=False)) for one in ids]

    def decode(self, ids: Sequence[int], special: bool = False) -> str:
        """Text of a response; ``special``: with special tokens. ValueError: a broken tokenizer."""
        with no_panic():
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def token(self, token: int) -> str:
        """Text of one token as it stands within a text, with its leading space.

        Of part of a character, and of a special token, its name in the vocabulary.
        """
        once, twice = (self.decode([token] * n) for n in (1, 2))
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
            if not self.chats:
                return None
            _, found, after = self.chat.render(probe, generate=False).rpartition(answer)
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

    @property
    def template(self) -> str | None:
        """The chat template, if there is one."""
        return self.chat.text

    @property
    def chats(self) -> bool:
        """Whether chat messages can be read: there is a template, and the config takes it."""
        return self.template is not None and self._mode != "never"

    def image_tokens(self, image: Media) -> int:
        """The most tokens that the model computes for an image. ProcessorError."""
        return self._processor.tokens(image)

    @cached_property
    def _processor(self) -> ImageProcessor:
        return (self._load_processor or partial(ImageProcessor.load, str(self._dir)))()

    @cached_property
    def placeholder(self) -> int | None:
        """The token that stands for an image in a prompt; None: the model reads no images.

        ValueError, OSError.
        """
        config = self._config
        found: list[int] = [
            one for name in PLACEHOLDERS if isinstance(one := config.get(name), int)
        ]
        if len(found) < 2 or self.template is None:
            return found[0] if found else None
        written = self.plain(self.chat.render(IMAGE_PROBE))
        return next((one for one in found if written.count(one) == 1), found[0])

    @property
    def unsampled_ids(self) -> tuple[int, ...]:
        """Tokens that stand for images, videos and sounds: no response may have one."""
        named = [name for name in self._config if NOT_TEXT.fullmatch(name)]
        kinds = ("image", "video", "audio")
        found = (self._config[name] for name in named if name.startswith(kinds))
        return tuple(one for one in found if isinstance(one, int))

    @cached_property
    def _config(self) -> dict[str, Any]:
        return read_json(self._dir / "config.json")

    @cached_property
    def _special(self) -> SpecialTokens:
        tokens = [self._config[name] for name in self._config if NOT_TEXT.fullmatch(name)]
        texts = [self._tokenizer.id_to_token(one) for one in tokens if isinstance(one, int)]
        return SpecialTokens(self._tokenizer, [*self.chat.named.values(), *filter(None, texts)])


def chat_of(section: Rendering, folder: Path, date: str | None = None) -> ChatTemplate:
    """The template of a section of the config, for a model in ``folder``, on a date."""
    file = section.chat_template_file
    return ChatTemplate(
        folder,
        None if file is None else Path(file),
        section.chat_template_kwargs or {},
        section.system_prompt,
        section.response_prefix,
        date,
    )


def text_settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of a config.json's language model, which may lie in its ``text_config``."""
    text = config.get("text_config")
    return {**config, **text} if isinstance(text, Mapping) else config


def eos_ids(model_dir: str | Path) -> tuple[int, ...]:
    """Tokens that end a response, by generation_config.json or else config.json.

    ValueError or TypeError if the value is not a token.
    """
    for name in ("generation_config.json", "config.json"):
        value = read_json(Path(model_dir) / name).get("eos_token_id")
        if value is not None:
            return tuple(int(one) for one in (value if isinstance(value, list) else [value]))
    return ()
