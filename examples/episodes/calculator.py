"""An environment with a calculator, and the questions that need one.

The class is one that TRL's ``environment_factory`` takes: its public methods are the model's tools.
"""

import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

OPERATIONS: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
EXPRESSION = re.compile(r"\s*(\d{1,9})\s*([-+*])\s*(\d{1,9})\s*")
SMALLEST, LARGEST = 4000, 9999
ASKED = "How much is "


class Calculator:
    """One episode: a question, and a calculator."""

    def __init__(self, broken: bool = False) -> None:
        """``broken``: the calculator gives no results."""
        self._broken = broken

    def reset(self, **row: Any) -> None:
        """Begins an episode; the row's prompt says all that the model has to know."""

    def calculate(self, expression: str) -> str:
        """Calculate with two whole numbers.

        Args:
            expression: a sum, a difference or a product, such as 12 + 34
        """
        found = EXPRESSION.fullmatch(expression)
        if self._broken or found is None:
            raise ValueError("no result")
        left, sign, right = found.groups()
        return str(OPERATIONS[sign](int(left), int(right)))


def row(rng: np.random.Generator) -> dict[str, str]:
    """A row with a random question: a product, which has eight digits."""
    left, right = map(int, rng.integers(SMALLEST, LARGEST + 1, 2))
    return {
        "prompt": f"{ASKED}{left} * {right}?",
        "answer": str(left * right),
        "data_source": "calculator",
    }


def rows(number: int, rng: np.random.Generator) -> list[dict[str, str]]:
    """So many rows with different questions."""
    made: dict[str, dict[str, str]] = {}
    while len(made) < number:
        one = row(rng)
        made[one["prompt"]] = one
    return list(made.values())
