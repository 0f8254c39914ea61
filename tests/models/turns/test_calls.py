"""Calls are read in the form in which the template writes them; malformed ones are values."""

from __future__ import annotations

import json
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.environments import AssistantMessage, ToolCall
from async_opd.models.tokenizer import Text
from async_opd.models.turns import Turns
from tests.models.turns.styles import STYLES

TOOLED = [name for name in STYLES if name != "gemma"]
GOOD = '{"name": "add", "arguments": {"a": 1}}'
ADD = ToolCall("add", {"a": 1})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Turns, Text]]:
    folder = tmp_path_factory.mktemp("styles")
    texts = {name: style.text(folder / name) for name, style in STYLES.items()}
    return {name: (Turns(text), text) for name, text in texts.items()}


def parsed(made: dict[str, tuple[Turns, Text]], style: str, text: str) -> AssistantMessage:
    turns, encoder = made[style]
    return turns.parse(np.array(encoder.plain(text), np.int32))


def schema(arguments: dict[str, Any]) -> dict[str, Any]:
    names: dict[type, str] = {str: "string", bool: "boolean", int: "integer", dict: "object"}
    types = {key: {"type": names.get(type(one), "array")} for key, one in arguments.items()}
    return {"function": {"name": "add", "parameters": {"properties": types}}}


texts = st.text(st.characters(codec="utf-8", exclude_characters="\ufdd0"), max_size=12)
tagless = st.text("ab \n\"'\\{}é✓,:1", max_size=12)
values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**9), 10**9) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


@given(
    st.dictionaries(texts, values, max_size=3), st.sampled_from(["qwen2.5", "llama", "deepseek"])
)
def test_arguments_come_back_as_they_were_written(
    made: dict[str, tuple[Turns, Text]], arguments: dict[str, Any], style: str
) -> None:
    inside = json.dumps(arguments, ensure_ascii=False)
    written = {
        "qwen2.5": f'<tool_call>{{"arguments": {inside}, "name": "add"}}</tool_call>',
        "llama": f'{{"name": "add", "parameters": {inside}}}',
        "deepseek": f"<calls_begin><call_begin>function<sep>add\n```json\n{inside}\n```<call_end>"
        "<calls_end>",
    }
    read = parsed(made, style, written[style])
    assert read == AssistantMessage("", calls=(ToolCall("add", arguments),))


@given(st.dictionaries(st.text("abc", min_size=1, max_size=3), tagless | values.filter(bool)))
@pytest.mark.parametrize("style", ["coder", "glm"])
def test_arguments_in_tags_come_back_by_the_types_of_the_schema(
    made: dict[str, tuple[Turns, Text]], style: str, arguments: dict[str, Any]
) -> None:
    def shown(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    pairs = [(key, shown(one)) for key, one in arguments.items()]
    if any("</" in one for _, one in pairs):
        return
    coder = "".join(f"<parameter={key}>\n{one}\n</parameter>\n" for key, one in pairs)
    glm = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{one}</arg_value>\n" for key, one in pairs)
    written = {
        "coder": f"<tool_call>\n<function=add>\n{coder}</function>\n</tool_call>",
        "glm": f"<tool_call>add\n{glm}</tool_call>",
    }
    turns, encoder = made[style]
    ids = np.array(encoder.plain(written[style]), np.int32)
    read = turns.parse(ids, [schema(arguments)])
    assert read == AssistantMessage("", calls=(ToolCall("add", arguments),))


@pytest.mark.parametrize(
    ("style", "text", "content", "calls"),
    [
        ("qwen2.5", f"<tool_call>{GOOD}</tool_call>\n<tool_call>\n{GOOD}\n</tool_call>", "", 2),
        ("qwen2.5", f"I add. <tool_call>{GOOD}</tool_call>", "I add.", 1),
        ("qwen2.5", f"[{GOOD}]", f"[{GOOD}]", 0),
        ("mistral", f"[TOOL_CALLS][{GOOD}, {GOOD}]", "", 2),
        ("mistral", f"[TOOL_CALLS] [{GOOD}]", "", 1),
        ("llama", GOOD.replace("arguments", "parameters"), "", 1),
        ("llama", f"{GOOD}; {GOOD}".replace("arguments", "parameters"), "", 2),
        ("llama", '{"answer": 3}', '{"answer": 3}', 0),
        ("llama", "it is 3 {", "it is 3 {", 0),
    ],
)
def test_calls_and_the_text_around_them(
    made: dict[str, tuple[Turns, Text]], style: str, text: str, content: str, calls: int
) -> None:
    assert parsed(made, style, text) == AssistantMessage(content, calls=(ADD,) * calls)


@pytest.mark.parametrize(
    ("style", "text", "calls", "malformed"),
    [
        ("qwen2.5", f"<tool_call>{GOOD}</tool_call>" * 16, 16, 0),
        ("qwen2.5", f"<tool_call>{GOOD}</tool_call>" * 60, 16, 1),
        ("qwen2.5", "<tool_call>" * 60, 0, 17),
        ("mistral", f"[TOOL_CALLS][{', '.join([GOOD] * 60)}]", 16, 1),
    ],
)
def test_the_calls_of_a_turn_are_bounded(
    made: dict[str, tuple[Turns, Text]], style: str, text: str, calls: int, malformed: int
) -> None:
    read = parsed(made, style, text)
    assert (len(read.calls), len(read.malformed)) == (calls, malformed)


DEEP = "[" * 100_000
BAD = {
    "not JSON": '{"name": add}',
    "a single value": "3",
    "no name": '{"arguments": {}}',
    "a name that is a number": '{"name": 3, "arguments": {}}',
    "arguments in a list": '{"name": "add", "arguments": [1]}',
    "arguments in a text": '{"name": "add", "arguments": "a=1"}',
    "a constant": '{"name": "add", "arguments": {"a": NaN}}',
    "depth": f'{{"name": "add", "arguments": {DEEP}',
    "some depth": f'{{"name": "add", "arguments": {{"a": {"[" * 90}{"]" * 90}}}}}',
    "a long number": f'{{"name": "add", "arguments": {{"a": {"9" * 5000}}}}}',
}


@pytest.mark.parametrize("bad", BAD)
def test_a_malformed_call_is_a_reason_and_stays_in_the_text(
    made: dict[str, tuple[Turns, Text]], bad: str
) -> None:
    text = f"<tool_call>{BAD[bad]}</tool_call>"
    read = parsed(made, "qwen2.5", f"{text}\n<tool_call>{GOOD}</tool_call>")
    assert (read.calls, len(read.malformed)) == ((ADD,), 1)
    assert BAD[bad] in read.content
    assert "\n" not in read.malformed[0]


@pytest.mark.parametrize(
    ("style", "text"),
    [
        ("qwen2.5", f"<tool_call>{GOOD}"),
        ("qwen2.5", "<tool_call>"),
        ("qwen2.5", '<tool_call>{"name": "ad'),
        ("mistral", "[TOOL_CALLS][{"),
        ("llama", '{"name": "add", "param'),
        ("coder", "<tool_call><function=add><parameter=a>1"),
        ("coder", "<tool_call><function=add><parameter=a"),
        ("coder", "<tool_call><function=add></tool_call>"),
        ("glm", "<tool_call>add"),
        ("glm", "<tool_call></tool_call>"),
        ("deepseek", "<call_begin>function<sep>add\n```json\n{}"),
        ("deepseek", "<call_begin>function<sep>"),
    ],
)
def test_a_call_that_is_cut_is_malformed(
    made: dict[str, tuple[Turns, Text]], style: str, text: str
) -> None:
    read = parsed(made, style, text)
    assert (read.calls, len(read.malformed), read.content) == ((), 1, text)


@pytest.mark.parametrize(
    ("text", "thought", "content"),
    [
        ("<think>\nso\n</think>\n\nit is 3", "so", "it is 3"),
        (f"<think>maybe <tool_call>{GOOD}</tool_call></think>3", f"maybe <tool_call>{GOOD}"
         "</tool_call>", "3"),
        ("<think>so and", "so and", ""),
        ("a </think> b", "", "a </think> b"),
    ],
)  # fmt: skip
def test_a_thought_is_the_text_up_to_its_end(
    made: dict[str, tuple[Turns, Text]], text: str, thought: str, content: str
) -> None:
    assert parsed(made, "qwen2.5", text) == AssistantMessage(content, thought)


PARTS = [
    *("<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=", "</parameter>"),
    *("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "[TOOL_CALLS]", "[", "]", "{", "}"),
    *('"name"', '"arguments"', '"parameters"', ":", '"add"', "add", ">", "\n", "<think>"),
    *("</think>", "<|im_end|>", "<call_begin>function<sep>", "```json", "<call_end>", "\\", '"'),
]


@given(st.lists(st.integers(0, 250), max_size=12), st.lists(st.sampled_from(PARTS), max_size=20))
@pytest.mark.parametrize("style", STYLES)
def test_any_tokens_have_a_message(
    made: dict[str, tuple[Turns, Text]], style: str, ids: list[int], parts: list[str]
) -> None:
    turns, text = made[style]
    sampled = [*ids, *text.plain("".join(parts)), *ids[::-1]]
    read = turns.parse(np.array(sampled, np.int32))
    assert all(isinstance(call.arguments, dict) and call.name for call in read.calls)


@pytest.mark.parametrize("part", [" ", "\n", "<tool_call>", "<tool_call>{", "[TOOL_CALLS][", "{"])
@pytest.mark.parametrize("style", TOOLED)
def test_a_long_text_is_read_in_bounded_time(
    made: dict[str, tuple[Turns, Text]], style: str, part: str
) -> None:
    turns, text = made[style]
    ids = np.array(text.plain(part) * (8000 // len(text.plain(part))), np.int32)
    started = time.perf_counter()
    assert turns.parse(ids).calls == ()
    assert time.perf_counter() - started < 5
