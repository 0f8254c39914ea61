"""What a config names that is a module of its own: a new one is a module and an entry here.

Entries are strings, because the modules lie in rooms that import the config. CONTRIBUTING.md shows
how to write such a module.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field, PositiveInt

from async_opd.config.section import Section
from async_opd.core.errors import SourceError
from async_opd.core.row import Row

if TYPE_CHECKING:
    from async_opd.config.data import DataConfig

SOURCES = {
    "file": "async_opd.data.files:FileSource",
    "reasoning_gym": "async_opd.data.reasoning_gym:ReasoningGymSource",
}
"""``kind`` of a source of prompts: its class, by its name."""
TRANSPORTS = {
    "gloo": "rollouter.transports.gloo",
    "nccl": "rollouter.transports.nccl",
}
"""``sync.backend``: the module with both ends of a weight transport, by its name."""


class PromptSource(Section):
    """A source of prompts: its keys in the config, and its rows. Each kind is a subclass."""

    kind: str
    weight: float = Field(default=1.0, gt=0)
    """Share of this source in the stream, relative to the other sources' weights."""
    stream: bool = False
    """Reads rows while they are needed. Only the first ``window`` of them are checked before the
    run, and rows are shuffled within a window only. Otherwise all rows are read and checked first,
    and copied to a temporary file."""
    window: PositiveInt = 2048
    """Rows of a streamed source that are in memory, and shuffled with each other."""

    @property
    def label(self) -> str:
        """What messages call it."""
        return self.kind

    @abstractmethod
    def rows(self, index: int, data: DataConfig, start: int = 0) -> Iterator[Row | SourceError]:
        """Rows from position ``start`` on, the same ones every time, one after the other.

        ``index`` is the source's place in ``data.train``; uids are ``<index>:<number>``, where
        numbers grow, and none is below its row's position. A row that is wrong comes as the error.
        SourceError is raised where the source as a whole cannot be read.
        """
