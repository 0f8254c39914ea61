"""Prompts from the ``reasoning-gym`` package: tasks that are made by a procedure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from async_opd.config.sections.data import PromptSource
from async_opd.config.sections.section import Count, Name
from async_opd.core.errors import SourceError
from async_opd.core.row import Row, Task

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig


class ReasoningGymSource(PromptSource):
    """Procedural tasks from the ``reasoning-gym`` package, graded by its own verifier."""

    kind: Literal["reasoning_gym"]
    task: Name
    """Name of the reasoning-gym dataset; it is also the rows' data source."""
    size: Count = 1000
    """Number of entries."""
    seed: int = 0
    """Seed of the generator: give training and evaluation different ones."""
    options: dict[str, Any] = Field(default={})
    """Further arguments of the task's own config."""

    @property
    def label(self) -> str:
        """The task."""
        return self.task

    def rows(self, index: int, data: DataConfig, start: int = 0) -> Iterator[Row | SourceError]:
        """See PromptSource.rows."""
        import reasoning_gym

        try:
            tasks = reasoning_gym.create_dataset(
                self.task, size=self.size, seed=self.seed, **self.options
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise SourceError(f"reasoning_gym {self.task}", str(error)) from error
        for at in range(start, self.size):
            entry = tasks[at]
            yield Row(
                uid=f"{index}:{at}",
                data_source=self.task,
                prompt=entry["question"],
                answer=entry["answer"],
                fields=entry,
                task=Task(self.task, self.options),
            )
