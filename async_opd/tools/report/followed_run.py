"""Follows the directory of a run that is running now: what is new in it since the last look.

A run that goes back to a checkpoint, or is resumed, replaces ``metrics.jsonl``: its rows then come
again from the first one.
"""

from __future__ import annotations

from dataclasses import dataclass

from async_opd.files.foreign import Place, foreign
from async_opd.files.json_lines import MetricsRow, metrics_row
from async_opd.observability.run_log import METRICS, RUN_LOG
from async_opd.tools.report.recorded_run import Message, messages

READ_BYTES = 16 << 20
"""Bytes that one look reads at most; a longer line is left out."""
END_BYTES = 64


@dataclass(frozen=True)
class News:
    """What a run has written since the last look.

    ``again``: the rows begin with the run's first one, whatever came before.
    """

    rows: tuple[MetricsRow, ...] = ()
    messages: tuple[Message, ...] = ()
    again: bool = False

    def __bool__(self) -> bool:
        return bool(self.rows or self.messages or self.again)


class FollowedRun:
    """Remembers how far the files of a run directory were read."""

    def __init__(self, folder: Place) -> None:
        self._metrics = FollowedLines(foreign(folder) / METRICS)
        self._log = FollowedLines(foreign(folder) / RUN_LOG)

    def look(self) -> News:
        """What is new; at most ``READ_BYTES`` of each file. OSError if one cannot be read."""
        again, rows = self._metrics.read()
        _, lines = self._log.read()
        found = (metrics_row(line) for line in rows if line.strip())
        return News(tuple(row for row in found if row is not None), tuple(messages(lines)), again)


class FollowedLines:
    """The complete lines of a file that another process appends to, cuts or replaces."""

    def __init__(self, path: Place) -> None:
        self._path = foreign(path)
        self._at = 0
        self._end = b""  # the last bytes that were read, in front of ``_at``

    def read(self) -> tuple[bool, list[str]]:
        """Whether the lines read before are no longer there, and the next ones. OSError."""
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            again, self._at, self._end = self._at > 0, 0, b""
            return again, []
        with file:
            file.seek(self._at - len(self._end))
            again = file.read(len(self._end)) != self._end
            if again:
                self._at, self._end = 0, b""
                file.seek(0)
            data = file.read(READ_BYTES)
        whole = data[: data.rfind(b"\n") + 1]
        if not whole and len(data) == READ_BYTES:
            whole = data
        if whole:
            self._at += len(whole)
            self._end = whole[-END_BYTES:]
        return again, whole.decode(errors="replace").split("\n")[:-1]
