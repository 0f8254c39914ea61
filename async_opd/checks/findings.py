"""Problems of one config, as they are found, and what a user should know besides."""

from __future__ import annotations

from dataclasses import dataclass, field

from async_opd.core.errors import Problem


@dataclass(frozen=True)
class Findings:
    """``where``: the file that the config's keys come from. ``notes`` stand against nothing."""

    where: str
    problems: list[Problem] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, message: str, remedy: str, where: str | None = None) -> None:
        """One more; of another file than the config if ``where`` names it."""
        self.problems.append(Problem(where or self.where, key, message, remedy))

    def has(self, key: str) -> bool:
        """Whether something was found at this key."""
        return any(problem.key == key for problem in self.problems)
