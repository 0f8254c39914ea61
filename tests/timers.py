"""A timer for tests: time passes when they say so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class ManualTimer:
    """A timer whose time is moved by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[list[Any]] = []

    def __call__(self, delay: float, call: Callable[[], None]) -> Any:
        due = self.due
        entry = [self.now + delay, call]
        self.due.append(entry)

        class Handle:
            def cancel(self) -> None:
                if entry in due:
                    due.remove(entry)

        return Handle()

    def advance(self, seconds: float) -> None:
        self.now += seconds
        for entry in [e for e in self.due if e[0] <= self.now]:
            self.due.remove(entry)
            entry[1]()
