"""Dialogues that show how the tools are used: the models learn from them.

A row becomes two lists of messages: ``shown`` is what the model reads, and some of the turns in it
that it should write are wrong; ``right`` has the right ones in their places, of as many tokens.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import calculator
import higher_lower
import numpy as np
from transformers.utils import get_json_schema

CORRUPTION = 0.1
"""Share of the model's digits and guesses that are shown as others. The rest must still be right,
so a teacher also gives good advice after a student's mistake."""
FAULTY = 0.1
"""Share of the calculator's dialogues whose first call gets an error."""
LETTERS = tuple("abcdefghijklmnopqrstuvwxyz ")
DIGITS = tuple("0123456789")

Message = dict[str, Any]
Dialogue = tuple[list[Message], list[Message]]


@dataclass(frozen=True)
class Task:
    """An example: its environment, its rows, and the dialogues that show how it is done."""

    environment: Callable[[], Any]
    zero: Message
    """A call of its tool, whose argument is 0."""
    rows: Callable[[int, np.random.Generator], Sequence[Mapping[str, Any]]]
    dialogue: Callable[[np.random.Generator], Dialogue]
    words: tuple[str, ...]
    """Texts that are one token, beside the description of the tool and the frame of a call."""

    @property
    def schema(self) -> dict[str, Any]:
        """The tool as the model reads it."""
        name = self.zero["tool_calls"][0]["function"]["name"]
        found: dict[str, Any] = get_json_schema(getattr(self.environment(), name))
        return found


def answering(content: str) -> Message:
    """A turn that is an answer."""
    return {"role": "assistant", "content": content}


def called(tool: str, argument: str, value: Any) -> Message:
    """A turn that is a call."""
    call = {"function": {"name": tool, "arguments": {argument: value}}}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def result(content: str) -> Message:
    """The answer of a tool."""
    return {"role": "tool", "content": content}


def _corrupted(text: str, rng: np.random.Generator) -> str:
    wrong = rng.random(len(text)) < CORRUPTION
    digits = rng.choice(DIGITS, len(text))
    return "".join(np.where(wrong, digits, list(text)))


def calculation(rng: np.random.Generator) -> Dialogue:
    """A question, a call, and its result as the answer; sometimes the first call fails."""
    row = calculator.row(rng)
    asked = row["prompt"].removeprefix(calculator.ASKED).removesuffix("?")
    shown: list[Message] = [{"role": "user", "content": row["prompt"]}]
    right = [*shown]
    answers = [result(row["answer"])]
    if rng.random() < FAULTY:
        fault = "".join(rng.choice(LETTERS, int(rng.integers(8, 40))))
        answers.insert(0, result(json.dumps({"error": fault})))
    for answer in answers:
        shown += [called("calculate", "expression", _corrupted(asked, rng)), answer]
        right += [called("calculate", "expression", asked), answer]
    return [*shown, answering(_corrupted(row["answer"], rng))], [*right, answering(row["answer"])]


def best_guess(low: int, high: int) -> int:
    """The number from low to high that a binary search from 1 to a power of two guesses first."""
    step = 1 << (high - low + 1).bit_length()
    while (found := -(-low // step) * step) > high:
        step //= 2
    return found


def search(rng: np.random.Generator) -> Dialogue:
    """A game of higher or lower in which some guesses are random."""
    guesses = int(rng.choice(higher_lower.GUESSES))
    row = higher_lower.row(guesses, rng)
    low, high = 1, higher_lower.largest(guesses)
    game = higher_lower.HigherLower()
    game.reset(row["number"], guesses)
    shown: list[Message] = [{"role": "user", "content": row["prompt"]}]
    right = [*shown]
    answer = ""
    while answer not in ("correct", "over"):
        best = made = best_guess(low, high)
        if rng.random() < CORRUPTION:
            made = int(rng.integers(1, higher_lower.largest(guesses) + 1))
        answer = game.guess(made)
        if answer == "higher":
            low = max(low, made + 1)
        elif answer == "lower":
            high = min(high, made - 1)
        shown += [called("guess", "number", made), result(answer)]
        right += [called("guess", "number", best), result(answer)]
    last = [answering(f"It is {made}." if answer == "correct" else "I lost.")]
    return shown + last, right + last


TASKS = {
    "tools": Task(
        calculator.Calculator,
        called("calculate", "expression", "0"),
        calculator.rows,
        calculation,
        (calculator.ASKED, '{"error": "'),
    ),
    "higher_lower": Task(
        higher_lower.HigherLower,
        called("guess", "number", 0),
        higher_lower.rows,
        search,
        (
            *map(str, range(1, higher_lower.largest(max(higher_lower.GUESSES)) + 1)),
            *("Guess a number from 1 to ", "higher", "lower", "correct", "over"),
            *("It is ", "I lost."),
        ),
    ),
}
