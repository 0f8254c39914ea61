"""The bounds of prompts: how many tokens fit the models, and which tokens they have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from async_opd.core.row import Row
from async_opd.data.streamed_rows import number_of


@dataclass(frozen=True)
class Room:
    """The bounds of the models: prompts of 1 to ``limit`` tokens, token ids below ``rows``.

    ``key`` is the config's key that sets the limit, or that takes the rest of the positions. A
    tokenizer's ids may have gaps, so that a model with enough rows lacks the last ones; its engine
    would die of such an id.
    """

    key: str
    limit: int
    rows: int | None
    overlong: str = "refuse"
    """``data.overlong``."""
    response: int = 0
    """Tokens of the longest response; 0: not known."""

    def faults(
        self, prompts: Iterable[tuple[Row, Sequence[int]]], long: set[str]
    ) -> Iterator[tuple[str, str]]:
        """Messages and remedies for prompts (token ids) beyond the bounds. Reads them once.

        ``long`` gets the uids of rows with a longer prompt, unless these are refused.
        """
        foreign, misfits, longest = Tally(), Tally(), 0
        for row, ids in prompts:
            self.add_foreign(row, ids, foreign)
            longest = max(longest, len(ids))
            if len(ids) > self.limit and self.overlong != "refuse":
                long.add(row.uid)
            elif not 1 <= len(ids) <= self.limit:
                misfits.add(f"row {number_of(row) + 1} with {len(ids)}")
        yield from self.foreign_faults("prompts", foreign)
        if misfits.count:
            yield (
                f"{misfits.count} prompts are empty or longer than {self.limit} tokens, the first "
                f"is {misfits.first}",
                f"shorten or remove them, or {self.remedy(longest)}",
            )

    def add_foreign(self, row: Row, ids: Sequence[int], foreign: Tally) -> None:
        """Counts a row with a token that a model has no embedding for."""
        largest = max(ids, default=0)
        if self.rows is not None and largest >= self.rows:
            foreign.add(f"row {number_of(row) + 1} with token {largest}")

    def foreign_faults(self, what: str, foreign: Tally) -> Iterator[tuple[str, str]]:
        """The message and remedy for what was counted, if anything was."""
        if foreign.count:
            yield (
                f"{foreign.count} {what} have tokens beyond the {self.rows} of the smallest "
                f"model, the first is {foreign.first}",
                f"change the {what}, or resize the model's embeddings",
            )

    def remedy(self, longest: int = 0) -> str:
        """The setting for longer prompts, the longest of which has so many tokens, if known."""
        more = max(longest - self.limit, 0)
        much = f" by {more}" * (more > 0)
        if self.key == "data.max_prompt_tokens":
            return f"raise {self.key}{much}, or set data.overlong"
        if self.response and more >= self.response:
            return "set data.overlong"
        return (
            f"lower {self.key}{much}: prompt, response and one more token must fit the shortest "
            "model, or the max_model_len of its engine; or set data.overlong"
        )


@dataclass
class Tally:
    """The number of rows with a fault, and a description of the first."""

    count: int = 0
    first: str = ""

    def add(self, description: str) -> None:
        self.first = self.first or description
        self.count += 1
