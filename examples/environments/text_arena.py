"""One game of TextArena as an environment: a tool sends the model's moves to the game.

    environment: {kind: class, factory: "text_arena:TextArena", kwargs: {game: GuessTheNumber-v0}}

Needs ``pip install textarena``, and a game for one player whose files come with the package.
"""

from threading import Lock
from typing import Any

import textarena

ONE_AT_A_TIME = Lock()
"""Games draw from Python's own generator, which all environments of a process share."""


class TextArena:
    """A game for one player. ``game`` is its id; ``options`` are arguments of the game."""

    def __init__(self, game: str, **options: Any) -> None:
        self._game = textarena.make(game, **options)
        self._over, self._reward = False, 0.0

    def reset(self, seed: int = 0, **row: Any) -> str:
        """Begins a game; its rules follow the prompt."""
        with ONE_AT_A_TIME:
            self._game.reset(num_players=1, seed=seed)
        return f"\n\n{self._game.get_observation()[1]}"

    def move(self, text: str) -> str:
        """Makes a move in the game.

        Args:
            text: The move, in the form that the game's rules ask for.
        """
        if self._over:
            raise ValueError("the game is over")
        self._over, _ = self._game.step(text)
        if not self._over:
            return str(self._game.get_observation()[1])
        rewards, info = self._game.close()
        self._reward = float(rewards[0])
        return str(info[0].get("reason", "the game is over"))

    def get_reward(self) -> float:
        """The game's reward of the only player; 0 before the end."""
        return self._reward
