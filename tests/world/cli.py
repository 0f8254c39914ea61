"""The commands of ``async_opd``, run in the tests' process."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from _pytest.capture import CaptureResult

from async_opd.cli import main


@dataclass(frozen=True)
class Cli:
    """Runs a command; its words may be paths, too."""

    captured: pytest.CaptureFixture[str]

    def __call__(self, *words: object, code: int = 0) -> CaptureResult[str]:
        """What was printed until the command ended, with this exit code."""
        ended, printed = main(list(map(str, words))), self.captured.readouterr()
        assert ended == code, printed
        return printed
