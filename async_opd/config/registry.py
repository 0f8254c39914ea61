"""The registries of prompt sources and weight transports: a new one is a module and an entry here.

Entries are strings, because the modules lie in rooms that import the config. CONTRIBUTING.md shows
how to write such a module.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Self

from pydantic import Field, PositiveInt, model_validator

from async_opd.config.sections.section import Section
from async_opd.core.errors import SourceError
from async_opd.core.row import Row

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig

SOURCES = {
    "file": "async_opd.data.files:FileSource",
    "hub": "async_opd.data.hub:HubSource",
    "reasoning_gym": "async_opd.data.reasoning_gym:ReasoningGymSource",
    "user": "async_opd.data.user:UserSource",
}
"""Classes of prompt sources, by their ``kind``."""
TRANSPORTS = {
    "gloo": "rollouter.transports.gloo",
    "nccl": "rollouter.transports.nccl",
    "shared_memory": "rollouter.transports.shared_memory",
}
"""Modules with both ends of a weight transport, by ``sync.backend``."""


class PromptSource(Section):
    """A source of prompts: its keys in the config, and its rows. Each kind is a subclass."""

    kind: str
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the stream, relative to the other sources' weights."""
    from_step: PositiveInt = 1
    """First step that has prompts of this source; only in ``data.train``."""
    until_step: PositiveInt | None = None
    """Last step that has prompts of this source; by default the last of all."""
    stream: bool = False
    """Reads rows only when they are needed: the first ``window`` rows are checked before the run,
    and rows are shuffled within a window. Otherwise all rows are read and checked first, and copied
    to a temporary file."""
    window: PositiveInt = 2048
    """Rows of a streamed source that are in memory, and shuffled with each other."""

    @model_validator(mode="after")
    def _begins_before_it_ends(self) -> Self:
        if self.until_step is not None and self.until_step < self.from_step:
            raise ValueError(f"until_step of at least from_step ({self.from_step})")
        return self

    def is_active(self, step: int) -> bool:
        """Whether the step has prompts of this source."""
        return self.from_step <= step and (self.until_step is None or step <= self.until_step)

    @property
    def label(self) -> str:
        """The source's name in messages."""
        return self.kind

    @property
    def absent(self) -> bool:
        """Whether its rows are not on this machine, and only a run may download them."""
        return False

    @abstractmethod
    def rows(self, index: int, data: DataConfig, start: int = 0) -> Iterator[Row | SourceError]:
        """Yields the rows from position ``start`` on, the same ones in every call.

        ``index`` is the source's position in ``data.train``; uids are ``<index>:<number>``, where
        numbers grow, and none is below its row's position. A SourceError, whose ``row`` is the
        number + 1, is yielded in place of a bad row. One is raised if the source as a whole cannot
        be read.
        """


def beginnings(sources: Sequence[PromptSource]) -> list[int]:
    """The steps at which sources begin, or are over, in order; the first step is one of them."""
    over = {source.until_step + 1 for source in sources if source.until_step is not None}
    return sorted({1, *(source.from_step for source in sources)} | over)
