"""An environment with a number to guess, and the rows with the numbers.

The class is one that TRL's ``environment_factory`` takes: its public methods are the model's tools.
"""

from typing import Any

import numpy as np

GUESSES = tuple(guesses for guesses in range(2, 8) for _ in range(guesses))
"""Guesses of episodes, by their shares. There are as many numbers as a binary search finds."""


def largest(guesses: int) -> int:
    """The largest number to find with so many guesses; the smallest is 1."""
    return (1 << guesses) - 1


class HigherLower:
    """One episode: a number to find with a few guesses."""

    _number, _left, _found = 0, 0, False

    def reset(self, number: int, guesses: int) -> None:
        """Begins an episode with the number and the guesses of a row."""
        self._number, self._left, self._found = number, guesses, False

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess
        """
        if self._left == 0 or self._found:
            return "over"
        self._left -= 1
        self._found = number == self._number
        if self._found:
            return "correct"
        if self._left == 0:
            return "over"
        return "higher" if number < self._number else "lower"

    def get_reward(self) -> float:
        """1 if the number was found."""
        return float(self._found)


def row(guesses: int, rng: np.random.Generator) -> dict[str, Any]:
    """A row with a random number."""
    last = largest(guesses)
    return {
        "prompt": f"Guess a number from 1 to {last}.",
        "number": int(rng.integers(1, last + 1)),
        "guesses": guesses,
        "data_source": f"{guesses}_guesses",
    }


def rows(number: int, rng: np.random.Generator) -> list[dict[str, Any]]:
    """So many rows; long games need most of the practice, and have most of the rows."""
    return [row(GUESSES[at % len(GUESSES)], rng) for at in range(number)]
