"""The terminal that the run and the commands print on. ``rich`` is imported when needed."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TextIO

from async_opd.core.printable import escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

PLAIN_WIDTH = 100
WHOLE_WIDTH = 100_000
"""More columns than any table has."""


def terminal_on(file: TextIO | None, plain: bool = False) -> Console:
    """A rich console that escapes control characters, and raises where rich would end the process.

    Text is not parsed as markup.
    """
    from rich.console import Console

    class Terminal(Console):
        """rich exits the process when the reader of a pipe is gone; the run must go on."""

        def render_str(self, text: str, **options: Any) -> Text:
            """Escapes a cell or a line."""
            return super().render_str(escaped(text), **options)

        def on_broken_pipe(self) -> None:
            """Raises the BrokenPipeError that rich is handling when it calls this."""
            raise

    options: dict[str, Any] = {"markup": False, "emoji": False, "highlight": False}
    options["force_jupyter"] = False  # a notebook gets text too, in place of HTML
    if plain:
        options |= {"force_terminal": False, "color_system": None, "width": PLAIN_WIDTH}
    return Terminal(file=file, **options)


def table_terminal(file: TextIO | None = None, whole: bool = False) -> Console:
    """A terminal for tables: every cell is on one line in a file or a pipe without ``COLUMNS``.

    ``whole``: on every terminal, which breaks long lines itself, so that texts can be copied.
    """
    terminal = terminal_on(file)
    if whole or not (terminal.is_terminal or "COLUMNS" in os.environ):
        terminal.width = WHOLE_WIDTH
    return terminal


def rate(value: float | None) -> str:
    """Tokens a second; thousands from 10,000 on, ``-`` for none."""
    if value is None:
        return "-"
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"


def share(value: float | None, digits: int = 0) -> str:
    """A share as a percentage, ``-`` for none."""
    return "-" if value is None else f"{value:.{digits}%}"


def duration(seconds: float) -> str:
    """``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
