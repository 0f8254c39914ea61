"""Problems of one config, and notes about settings that are valid but may be unintended."""

from __future__ import annotations

from dataclasses import dataclass, field

from async_opd.core.errors import Problem


@dataclass(frozen=True)
class Findings:
    """Collects problems and notes. ``where``: the file of the config. No note stops a run."""

    where: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, message: str, remedy: str, where: str | None = None) -> None:
        """Adds a problem of the config's key, or of a key in the file ``where``."""
        self.problems.append(Problem(where or self.where, key, message, remedy))

    def has(self, key: str) -> bool:
        """Whether there is a problem of this key."""
        return any(problem.key == key for problem in self.problems)
