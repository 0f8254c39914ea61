"""Chat templates at random, and the turns that a model samples under one, of all kinds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from async_opd.core.environments import AssistantMessage, Message, ToolCall
from async_opd.core.sequence import Int32
from async_opd.models.tokenizer import Text
from async_opd.models.turns import Turns
from tests.models.turns.styles import (
    ADD,
    CODER_CALL,
    DEEP_CALL,
    GLM_CALL,
    HERMES_CALL,
    LAST_USER,
    STYLES,
    THOUGHT,
    Style,
)

SECRET = "<|secret|>"
"""A special token that no template writes."""
ROLES = ("system", "user", "assistant", "tool")
CALL, OTHER, UNKNOWN = (
    ToolCall("add", {"a": 1, "b": "2 \n 3"}),
    ToolCall("add", {"a": -4, "b": '"}'}),
    ToolCall("sub", {"a": 1}),
)
ANSWERS = (
    AssistantMessage("it is 42"),
    AssistantMessage(" the answer is\n\n 42 \n"),
    AssistantMessage("it is 42", thought="add 4 and 2?"),
    *(AssistantMessage("", calls=(one,)) for one in (CALL, CALL, OTHER)),
    AssistantMessage("", thought="I add", calls=(CALL,)),
    AssistantMessage("", calls=(CALL, OTHER)),
    AssistantMessage("", calls=(UNKNOWN,)),
)
QUESTION: Message = {"role": "user", "content": "how much?"}


def random_style(chance: random.Random) -> Style:
    """One of the families, or a template of random parts.

    Some of these append only; others strip thoughts or white space, or change earlier turns.
    """
    some = chance.choice
    if chance.random() < 0.4:
        return STYLES[some([*STYLES])]
    names = tuple(f"<|{role}|>" for role in ROLES)
    head, special = some(
        [
            ("<|im_start|>{{ m.role }}\n", ("<|im_start|>",)),
            ("<|{{ m.role }}|>\n", names),
            ("### {{ m.role }}:\n", ()),
        ]
    )
    opens = special == names and chance.random() < 0.5  # the next header ends a turn
    ends = ("<|endoftext|>", "<|user|>", "<|tool|>") if opens else ("<|im_end|>",)
    tail = "" if opens else "<|im_end|>" + some(["\n", "", "\n\n", " "])
    keep = some(["", "true", "loop.index0 > ns.last"])
    shows = f"{{% if m.reasoning_content and {keep} %}}{THOUGHT}{{% endif %}}" if keep else ""
    earlier = some(["", "", "", "{% if loop.index0 < ns.last %}(earlier) {% endif %}"])
    content = some(["{{ m.content }}", "{{ m.content }}", "{{ m.content | trim }}"])
    call = some([HERMES_CALL, CODER_CALL, GLM_CALL, DEEP_CALL])
    calls = f"{{% for c in m.tool_calls %}}{call}{{% endfor %}}"
    result = some([content, f"<tool_response>\n{content}\n</tool_response>"])
    answer = f"{earlier}{shows}{content}{calls}"
    body = (
        f"{{% if m.role == 'assistant' %}}{answer}{{% elif m.role == 'tool' %}}{result}"
        f"{{% else %}}{content}{{% endif %}}"
    )
    system = head.replace("{{ m.role }}", "system")
    tools = f"{{% if tools %}}{system}{{{{ tools | tojson }}}}{tail}{{% endif %}}"
    begun = head.replace("{{ m.role }}", "assistant") + some(["", "", "<think>\n"])
    template = (
        f"{LAST_USER}{some(['', '{{ bos_token }}'])}{tools}{{% for m in messages %}}{head}{body}"
        f"{tail}{{% endfor %}}{{% if add_generation_prompt %}}{begun}{{% endif %}}"
    )
    return Style(template, ends, special)


@dataclass(frozen=True)
class Model:
    """A tokenizer with a template, and the turns that it can sample; ``tools``: it is shown them.

    ``turns`` are token ids of turns with calls, answers and thoughts, to their first end.
    """

    text: Text
    tools: bool
    ends: tuple[int, ...]
    secret: int
    turns: tuple[Int32, ...]
    _tokenizer: Tokenizer = field(repr=False)

    @classmethod
    def of(
        cls,
        text: Text,
        turns: Turns,
        folder: Path,
        tools: bool,
        answers: Sequence[AssistantMessage] = ANSWERS,
    ) -> Model:
        """That of a folder, whose template is ``turns``; it samples these answers, and others."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        ends, shown = text.response_ends(), [ADD] if tools else []
        chosen = (one for one in answers if tools or not one.calls)
        found = (_sampled(turns, one, ends, shown) for one in chosen)
        plain = np.array([*text.plain("I add </think> it is 42"), ends[0]], np.int32)
        sampled = (plain, *(one for one in found if one is not None))
        return cls(text, tools, ends, tokenizer.token_to_id(SECRET), sampled, tokenizer)

    def turn(self, chance: random.Random, most: int) -> tuple[Int32, bool]:
        """Ids of a turn of at most so many tokens, and whether it was cut off there."""
        kind = chance.random()
        if kind < 0.75:
            ids = [*map(int, chance.choice(self.turns))]
            if chance.random() < 0.05:
                ids.insert(chance.randrange(len(ids)), self._any(chance))
        else:
            ids = [self._any(chance) for _ in range(chance.randint(0 if kind > 0.99 else 1, 9))]
            ids += chance.choice([(), (), (chance.choice(self.ends),)])
        if ids and chance.random() < 0.3 and ids[-1] in self.ends:
            ids.pop()  # the engine leaves it out
        if chance.random() < 0.3:
            ids = [part for one in ids for part in self._split(one, chance)]
        return np.array(ids[:most], np.int32), len(ids) >= most

    def _any(self, chance: random.Random) -> int:
        """A token that ends nothing."""
        while (one := chance.randrange(self.text.size)) in self.ends:
            pass
        return one

    def _split(self, one: int, chance: random.Random) -> list[int]:
        """The token, or the same text as tokens of a byte each, which no tokenizer would make."""
        if one in self._tokenizer.get_added_tokens_decoder() or chance.random() < 0.7:
            return [one]
        return [self._tokenizer.token_to_id(byte) for byte in self._tokenizer.id_to_token(one)]


def _sampled(
    turns: Turns, answer: AssistantMessage, ends: tuple[int, ...], tools: list[Any]
) -> Int32 | None:
    """The tokens with which a model would say so; None if the template does not show it."""
    try:
        begun = turns.opening([QUESTION], tools)
        whole = turns.rendered([QUESTION, answer, QUESTION], tools)
    except ValueError:
        return None
    same = len(begun) <= len(whole) and np.array_equal(whole[: len(begun)], begun)
    rest = [*map(int, whole[len(begun) :])] if same else []
    end = next((at for at, one in enumerate(rest) if one in ends), None)
    return None if not end else np.array(rest[: end + 1], np.int32)
