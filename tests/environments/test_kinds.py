"""Tools as a model reads and calls them: every call has an answer, and none raises."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from async_opd.core.environments import AssistantMessage, Outcome
from async_opd.core.errors import StageError
from async_opd.environments.kinds import kind_of, schemas_of
from tests.world.environments import WORLD, call, calls, row, spec_of


def played(message: AssistantMessage, **section: Any) -> Outcome:
    made = kind_of(spec_of(**section).config)()
    made.reset(row(), 0)
    return made.step(message)


def contents(outcome: Outcome) -> list[str]:
    return [message["content"] for message in outcome.messages]


def test_public_methods_are_tools_with_the_schema_of_their_hints_and_docstring() -> None:
    opening = kind_of(spec_of().config)().reset(row(), 0)
    shown = {tool["function"]["name"]: tool["function"] for tool in opening.tools}
    assert list(shown) == ["add", "do", "drawn", "large", "later", "pid", "variable"]
    assert shown["add"]["description"] == "Adds to the total."
    assert shown["add"]["parameters"] == {
        "type": "object",
        "properties": {"number": {"type": "integer", "description": "The number to add."}},
        "required": ["number"],
    }


@pytest.mark.slow
def test_a_tool_is_shown_without_an_import_of_torch() -> None:
    program = f"""
import sys
from async_opd.environments.kinds import schemas_of
from {WORLD} import multiply
assert schemas_of(dict(multiply=multiply))[0]["function"]["parameters"]["required"] == ["a", "b"]
assert "torch" not in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_a_tool_that_takes_a_tensor_is_shown_as_transformers_shows_it() -> None:
    import torch

    def play(sound: torch.Tensor) -> None:
        """Plays.

        Args:
            sound: What is played.
        """

    play.__annotations__["sound"] = torch.Tensor
    (schema,) = schemas_of({"play": play})
    assert schema["function"]["parameters"]["properties"]["sound"]["type"] == "audio"


def test_each_call_of_a_turn_has_a_message_in_order_and_others_than_texts_are_json() -> None:
    outcome = played(calls(("add", {"number": 3}), ("later", {}), ("add", {"number": 4})))
    assert [message["name"] for message in outcome.messages] == ["add", "later", "add"]
    assert {message["role"] for message in outcome.messages} == {"tool"}
    assert contents(outcome) == ["3", '["later"]', "7"]
    assert (outcome.done, outcome.unknown) == (False, 0)


def test_a_turn_without_any_call_ends_the_episode() -> None:
    assert played(AssistantMessage("I am done")) == Outcome(done=True)


def test_an_unknown_tool_is_a_message_with_the_names_of_all_and_counts() -> None:
    outcome = played(call("subtract", number=1))
    assert outcome.unknown == 1
    assert "the tool 'subtract' does not exist" in json.loads(contents(outcome)[0])["error"]
    assert "add" in contents(outcome)[0]


@pytest.mark.parametrize("given", [{}, {"numbers": 1}, {"number": 1, "more": 2}])
def test_arguments_that_a_tool_does_not_take_are_a_message_and_count(given: dict[str, int]) -> None:
    outcome = played(calls(("add", given)))
    assert outcome.unknown == 1
    assert "does not take these arguments" in json.loads(contents(outcome)[0])["error"]


@pytest.mark.parametrize(("what", "text"), [("raise", "no such square"), ("leave", "left")])
def test_a_tool_that_raises_is_a_message_and_does_not_count(what: str, text: str) -> None:
    outcome = played(call("do", what=what))
    assert (contents(outcome), outcome.unknown) == ([json.dumps({"error": text})], 0)


def test_an_async_tool_that_is_cancelled_is_a_message() -> None:
    assert contents(played(call("later", text="cancelled"))) == ['{"error": "CancelledError"}']


def test_calls_that_could_not_be_read_are_messages_and_the_episode_goes_on() -> None:
    outcome = played(calls(malformed=("no JSON", "no name")))
    assert contents(outcome) == ['{"error": "no JSON"}', '{"error": "no name"}']
    assert not outcome.done


def test_methods_that_begin_with_an_underscore_are_not_called() -> None:
    assert played(call("_hidden")).unknown == 1


def test_functions_are_tools_without_a_reset_and_a_reward() -> None:
    made = kind_of(spec_of("tools", tools=[f"{WORLD}:multiply"]).config)()
    assert [tool["function"]["name"] for tool in made.reset(row(), 0).tools] == ["multiply"]
    assert contents(made.step(call("multiply", a=6, b=7))) == ["42"]
    assert made.reward() is None


@pytest.mark.parametrize(
    ("factory", "found"),
    [
        ("WithoutReset", "has no method reset"),
        ("WithoutTools", "has no tools"),
        ("WithoutHints", "type hint"),
        ("WithoutDocstring", "docstring"),
        ("Missing", "no attribute"),
    ],
)
def test_a_class_that_is_not_an_environment_is_refused_with_a_remedy(
    factory: str, found: str
) -> None:
    with pytest.raises(StageError, match=found) as refused:
        kind_of(spec_of(factory=f"{WORLD}:{factory}").config)
    assert refused.value.remedy


def test_a_factory_may_be_a_function_and_takes_the_arguments() -> None:
    made = kind_of(spec_of(factory=f"{WORLD}:made", kwargs={"start": 5}).config)()
    made.reset(row(), 0)
    assert made.reward() == 5.0


def test_reset_takes_the_rows_fields_that_it_names() -> None:
    made = kind_of(spec_of(factory=f"{WORLD}:NeedsField").config)()
    assert made.reset(row(board="x o", other=1), 0).text == "x o"


def test_a_reset_that_returns_other_than_a_text_is_refused() -> None:
    made = kind_of(spec_of(factory=f"{WORLD}:NeedsField").config)()
    with pytest.raises(StageError, match="reset returned list"):
        made.reset(row(board="list"), 0)


def test_the_same_seed_begins_the_same_episode_where_reset_takes_it() -> None:
    make = kind_of(spec_of().config)
    drawn = []
    for seed in (1, 1, 2):
        made = make()
        made.reset(row(), seed)
        drawn += contents(made.step(call("drawn")))
    assert drawn[0] == drawn[1] != drawn[2]
