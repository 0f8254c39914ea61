"""A source of prompts in one file, without end: what CONTRIBUTING.md walks through.

No table names it: the tests register it, check a config with it, and take prompts from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING, Literal

from async_opd.config.sections.data import PromptSource
from async_opd.core.errors import SourceError
from async_opd.core.row import Row

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig  # at run time it imports this module


class SquaresSource(PromptSource):
    """Squares of all numbers."""

    kind: Literal["squares"]
    stream: Literal[True] = True
    """There is no end: it can only be streamed."""
    subject: str = "sort"
    """The rows' data source."""

    def rows(self, index: int, data: DataConfig, start: int = 0) -> Iterator[Row | SourceError]:
        """See PromptSource.rows."""
        for number in count(start):
            prompt, answer = f"{number} * {number} =", str(number**2)
            yield Row(f"{index}:{number}", self.subject, prompt, answer, {"number": number})
