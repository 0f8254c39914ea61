"""Rollouts that no teacher could score: counted against what is allowed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from async_opd.core.errors import StageError
from async_opd.core.samples import Header, Lost

AT_LEAST = 1000
"""Rollouts that a share is taken of, before a teacher has had so many."""


class DeadLetters:
    """Counts by teacher. ``max_shares[teacher]`` is the share that may be lost."""

    def __init__(self, max_shares: Mapping[str, float]) -> None:
        self._max_shares = dict(max_shares)
        self._trained: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()

    def trained(self, headers: Iterable[Header]) -> None:
        """These were scored and trained."""
        self._trained.update(header.teacher for header in headers)

    def add(self, lost: Lost) -> None:
        """One more. StageError if that is more than max_share · max(lost + trained, 1000)."""
        teacher = lost.header.teacher
        self._lost[teacher] += 1
        count = self._lost[teacher]
        of = max(count + self._trained[teacher], AT_LEAST)
        allowed = self._max_shares[teacher] * of
        if count > allowed:
            raise StageError(
                f"teacher {teacher}",
                f"{count} rollouts could not be scored; allowed are {allowed:g} "
                f"({self._max_shares[teacher]:g} of {of}). The last, {lost.header.uid}: "
                f"{lost.reason}",
                "see dead_letters.jsonl for all of them, or raise "
                f"teachers.{teacher}.max_dead_letter_share",
            )
