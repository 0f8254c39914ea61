"""A class as TRL's ``environment_factory`` takes it; it runs here and there without a change.

    environment: {kind: class, factory: "hot_and_cold:HotAndCold"}

A row of the data: ``{"prompt": "Find the treasure on the line from 0 to 9.", "treasure": 7}``
"""


class HotAndCold:
    """A treasure lies at a place of a line, and the model walks there by a few steps."""

    def reset(self, treasure: int, **row: object) -> str:
        """Begins an episode with the row's field ``treasure``."""
        self._treasure, self._place, self._steps = treasure, 0, 0
        return " You stand at 0."

    def walk(self, to: int) -> str:
        """Walks to a place and says whether the treasure is nearer there.

        Args:
            to: The place to walk to.
        """
        if self._steps == 8:
            raise ValueError("You are too tired to walk.")
        before, self._place = abs(self._place - self._treasure), to
        after = abs(self._place - self._treasure)
        self._steps += 1
        if not after:
            return "Here it is."
        return "warmer" if after < before else "colder"

    def get_reward(self) -> float:
        """1 if the model stands at the treasure in the end."""
        return float(self._place == self._treasure)
