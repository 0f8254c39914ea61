"""Whatever a template does with a history: what follows sampled tokens is what it would write."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.environments import AssistantMessage, Message, ToolCall
from async_opd.models.chat_template import ChatTemplate
from async_opd.models.tokenizer import Text
from async_opd.models.turns import Turns
from tests.models.turns.styles import CODER_CALL, GLM_CALL, HERMES_CALL, THOUGHT, Style

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
ENDS = ("<|end|>", "<|user|>", "<|tool|>", "<|return|>")
KEEPS = {
    "always": "true",
    "since the last user": "loop.index0 > ns.last",
    "of the last message": "loop.last",
    "never": "false",
}


@dataclass(frozen=True)
class Made:
    """A template by its parts; an ``end`` that is empty is the role of the next turn."""

    end: str
    line: str
    keep: str
    last_end: str
    opened: str
    call: str
    system: bool

    @property
    def template(self) -> str:
        thought = f"{{% if m.reasoning_content and {KEEPS[self.keep]} %}}{THOUGHT}{{% endif %}}"
        end = f"{{% if loop.last and m.role == 'assistant' %}}{self.last_end or self.end}"
        end += f"{{% else %}}{self.end}{{% endif %}}{self.line}"
        calls = f"{{% for c in m.tool_calls %}}{self.call}{{% endfor %}}"
        return (
            "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
            "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}<s>"
            + "Be good.\n" * self.system
            + "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}<|{{ m.role }}|>"
            + f"\n{thought}{{{{ m.content }}}}{calls}{end}{{% endfor %}}"
            + f"{{% if add_generation_prompt %}}<|assistant|>\n{self.opened}{{% endif %}}"
        )

    def sampled(self, answer: AssistantMessage) -> str:
        """The text that a model writes for an answer after the generation prompt."""
        thought = f"{answer.thought}\n</think>\n\n" if answer.thought else ""
        begun = "" if self.opened or not thought else "<think>\n"
        return begun + thought + answer.content + "".join(map(self._written, answer.calls))

    def _written(self, call: ToolCall) -> str:
        value = call.arguments["a"]
        return {
            HERMES_CALL: "<tool_call>\n"
            + json.dumps({"name": "add", "arguments": {"a": value}}, ensure_ascii=False)
            + "\n</tool_call>",
            CODER_CALL: f"<tool_call>\n<function=add>\n<parameter=a>\n{value}\n</parameter>\n"
            "</function>\n</tool_call>",
            GLM_CALL: f"<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>{value}</arg_value>\n"
            "</tool_call>",
        }[self.call]


words = st.text("ab 1\n<", min_size=1, max_size=6).map(lambda one: f"x{one}y")
spelled = words | st.sampled_from(["<|end|>", "x<|user|>", "<|assistant|>\n", "<|tool", "é✓\ufdd0"])
templates = st.builds(
    Made,
    end=st.sampled_from(["<|end|>", " \n<|end|>", ""]),
    line=st.sampled_from(["", "\n"]),
    keep=st.sampled_from([*KEEPS]),
    last_end=st.sampled_from(["", "", "<|return|>"]),
    opened=st.sampled_from(["", "", "<think>\n"]),
    call=st.sampled_from([HERMES_CALL, CODER_CALL, GLM_CALL]),
    system=st.booleans(),
)
users = st.builds(lambda text: {"role": "user", "content": text}, spelled)
results = st.builds(lambda text: {"role": "tool", "name": "add", "content": text}, spelled)


def keeping(made: Made) -> Made:
    """A template like it that keeps thoughts, and whose turns end in one token."""
    end, since = made.end.strip(), "since the last user"
    keep = since if made.keep in (since, "never") and not made.opened else "always"
    return replace(made, end=end, line=made.line if end else "", keep=keep)


@st.composite
def episodes(
    draw: st.DrawFn, of: st.SearchStrategy[Made] = templates
) -> tuple[Made, list[Message], list[tuple[Any, list[Message]]]]:
    """A template, a prompt, and turns: an answer and the messages after it."""
    made = draw(of)
    turns: list[tuple[Any, list[Message]]] = []
    for _ in range(draw(st.integers(1, 3))):
        thought = draw(words if made.opened else words | st.just(""))
        count = draw(st.integers(0, 2))
        calls = tuple(ToolCall("add", {"a": draw(words)}) for _ in range(count))
        answer = AssistantMessage(draw(words), thought.strip(), calls)
        new = [draw(results) for _ in calls] + [draw(users)] * (not calls or draw(st.booleans()))
        turns.append((answer, new))
    return made, [draw(users)], turns


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("random")


def text_of(folder: Path, made: Made) -> Text:
    """The same tokenizer with this template."""
    style = Style("", ENDS, ("<|assistant|>",))
    if not (folder / "tokenizer.json").exists():
        style.text(folder)
    text = Text(folder)
    text.chat = ChatTemplate(folder)
    text.chat.__dict__["text"] = made.template.replace("\n", "{{ '\\n' }}")
    return text


@given(episode=episodes(), closed=st.booleans())
def test_appended_tokens_are_those_of_the_template_wherever_it_keeps_the_prefix(
    folder: Path, episode: Any, closed: bool
) -> None:
    made, history, turns = episode
    text = text_of(folder, made)
    append, again = Turns(text), Turns(text, "template")
    context = list(map(int, append.opening(history, [TOOL])))
    thoughts = False
    for answer, new in turns:
        ids = text.plain(made.sampled(answer))
        role = f"<|{new[0]['role']}|>"
        ids += text.plain(made.end.strip() or role) * closed
        sampled = np.array(ids, np.int32)
        history = [*history, answer, *new]
        whole = list(map(int, append.rendered(history, [TOOL])))
        after = append.after(sampled, new, [TOOL])
        assert after is not None
        before = [*context, *ids]
        if whole[: len(before)] == before and (closed or not made.end.startswith(" ")):
            assert [*before, *after] == whole
        kept = again.after(sampled, new, [TOOL], thoughts)
        if kept is not None:
            assert list(kept) == list(after)
            assert [*before, *kept] == whole
        thoughts |= bool(answer.thought)
        context = whole if kept is None else [*before, *kept]


@given(episode=episodes(templates.map(keeping)))
def test_a_context_is_rendered_again_only_where_the_template_changes_it(
    folder: Path, episode: Any
) -> None:
    made, history, turns = episode
    text = text_of(folder, made)
    again = Turns(text, "template")
    for answer, new in turns:
        ids = text.plain(made.sampled(answer) + (made.end or f"<|{new[0]['role']}|>"))
        changes = answer.thought and new[-1]["role"] == "user" and made.keep != "always"
        if not changes:
            assert again.after(np.array(ids, np.int32), new, [TOOL]) is not None
        history = [*history, answer, *new]


def test_a_template_whose_turns_end_otherwise_in_a_history_is_rendered_again(folder: Path) -> None:
    made = Made("<|end|>", "\n", "always", "<|return|>", "", HERMES_CALL, False)
    text = text_of(folder, made)
    sampled = np.array(text.plain("it is 3<|return|>"), np.int32)
    new = [{"role": "user", "content": "and now?"}]
    assert Turns(text, "template").after(sampled, new) is None
    after = Turns(text).after(sampled, new)
    assert after is not None
    assert text.decode(after, special=True).startswith("<|end|>\n<|user|>\nand now?<|end|>\n")
