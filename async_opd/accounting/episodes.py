"""Warnings about the episodes of a run with an environment, each given once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from async_opd.config.sections.environment import EnvironmentConfig
from async_opd.core.samples import Header

FIRST = 64
"""Episodes after which tools have been called, unless calls cannot be read."""
MAX_COLLATERAL = 0.01
"""Share of the episodes above which more processes are advised."""
COLLATERAL, EPISODES = "rollout/collateral", "rollout/episodes"


class EpisodeWatch:
    """Reads headers of trained episodes, and metrics of the pools."""

    def __init__(self, environment: EnvironmentConfig | None) -> None:
        self._environment = environment
        self._seen = self._calls = self._malformed = 0
        self._begun_again = False

    def observe(self, trained: Iterable[Header], metrics: Mapping[str, float]) -> Iterator[str]:
        """The warnings that a step gives."""
        if self._environment is None:
            return
        before = self._seen
        for facts in (header.episode for header in trained):
            if facts is not None:
                self._seen += 1
                self._calls += facts.calls
                self._malformed += facts.malformed
        if before < FIRST <= self._seen and self._environment.has_tools and not self._calls:
            yield (
                f"no call of a tool was read in the first {self._seen} episodes, and "
                f"{self._malformed} could not be read: calls are read in the form in which the "
                "student's chat template writes them → async_opd check --episodes 4 shows turns; "
                "a cold start teaches the form (cold_start.answers: teacher)"
            )
        again, begun = metrics.get(COLLATERAL, 0.0), metrics.get(EPISODES, 0.0)
        if not self._begun_again and again > MAX_COLLATERAL * max(begun, 100):
            self._begun_again = True
            yield (
                f"{again:.0f} of {begun:.0f} episodes began again because another one in their "
                "process hung or died → raise environment.processes (now "
                f"{self._environment.processes}), or make the environment quicker"
            )
