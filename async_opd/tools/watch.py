"""``async_opd watch RUN_DIR``: the live view of a run in another terminal, read only.

metrics.jsonl, run.log ──FollowedRun──► ViewState ──► the console that the run itself has
live.json: which process runs, what pools wait for
summary.json: how it ended
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path
from typing import TextIO

from async_opd.config.load import load_recorded_config
from async_opd.config.run_config import RunConfig
from async_opd.core.errors import ConfigError
from async_opd.core.printable import indented, on_one_line
from async_opd.files.absent import nearest
from async_opd.files.foreign import Place, foreign
from async_opd.files.lines import MetricsRow, metrics_row
from async_opd.files.run_format import FORMAT_FILE, refuse_no_run, refuse_other_formats
from async_opd.observability.live.console import LiveConsole, PlainConsole, open_console, print_end
from async_opd.observability.live.display import Display
from async_opd.observability.live.live_file import LiveRun, read_live
from async_opd.observability.live.view_state import ViewState
from async_opd.observability.run_log import METRICS, RUN_LOG
from async_opd.observability.sinks import Summary
from async_opd.observability.terminal import terminal_on
from async_opd.tools.report.recorded_run import Message, left_out, messages, read_summary

ENDED, GONE = 0, 1
"""Exit codes: the run has ended, however; the run's process is gone."""
LOOK_S = 0.5
SILENT_S = 10.0
"""Seconds without a sign of life after which the run's process is looked for."""
LOST_S = 60.0
"""Seconds without a sign of life after which a process on another machine counts as gone."""
WAIT_S = 60.0
READ_BYTES = 16 << 20
"""Bytes that one look reads at most; a longer line is left out."""
END_BYTES = 64


@dataclass(frozen=True)
class News:
    """Lines that a run has written since the last look.

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
        """The new lines; at most ``READ_BYTES`` of each file. OSError if one cannot be read."""
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
        """Whether the lines read before are gone, and the next ones. OSError."""
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


def add_watch(parser: argparse.ArgumentParser) -> None:
    """Shows a run in this terminal while it runs in another one, and how it ended.

    Reads the run directory and writes nothing. Ctrl-C ends the view, not the run. Exit code 1: the
    run's process is gone.

      async_opd watch runs/quickstart
    """
    parser.add_argument("run_dir", metavar="RUN_DIR", help="directory of a run")
    what = f"seconds to wait for a run that has not begun yet (default: {WAIT_S:g})"
    parser.add_argument("--wait", type=float, default=WAIT_S, metavar="S", help=what)
    parser.set_defaults(command=lambda given: watch(Path(given.run_dir), given.wait))


def watch(folder: Path, wait_s: float) -> int:
    """Shows the run until it ends. ConfigError if there is none within ``wait_s``; OSError."""
    return Watch(folder).run(wait_s)


@dataclass
class ReplayClock:
    """The time of the row that is shown, while a run's past is read; after that the time now."""

    clock: Callable[[], float] = time.time
    moment: float | None = None

    def __call__(self) -> float:
        return self.clock() if self.moment is None else self.moment


@dataclass
class Watch:
    """One view of one run directory. ``file`` is stdout if None."""

    folder: Path
    file: TextIO | None = None
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    _last_row: tuple[float, float] | None = field(default=None, init=False)
    _last: float = field(default=0.0, init=False)  # the time of the last row or message

    def __post_init__(self) -> None:
        self._replay = ReplayClock(self.clock)

    def run(self, wait_s: float) -> int:
        """See ``watch``."""
        config = self._config(wait_s)
        log = config.log.model_copy(update={"console": "auto"})
        followed = FollowedRun(self.folder)
        summary, live = read_summary(self.folder), read_live(self.folder)
        if summary is not None:
            state = ViewState(config, self._replay)
            self._read_past(state, followed, summary, live)
            return self._show_end(state, summary)
        console = open_console(config.model_copy(update={"log": log}), self._replay, self.file)
        assert console is not None
        self._read_past(console.state, followed, summary, live)
        self._replay.moment = None
        console.start()
        try:
            return self._follow(console, followed)
        except BaseException:
            console.leave()
            raise

    def _config(self, wait_s: float) -> RunConfig:
        """The run's config. ConfigError if no run has begun within the time."""
        if self.folder.is_file() or any(
            one.is_dir() and (one / FORMAT_FILE).exists() for one in foreign(self.folder).entries()
        ):
            refuse_no_run(self.folder)
        file, since = foreign(self.folder) / "config.yaml", self.clock()
        if not file.exists() and wait_s > 0:
            near = "" if self.folder.is_dir() else f" ({nearest(self.folder)})"
            print(on_one_line(f"waiting for a run in {self.folder}, {wait_s:g} s at most{near}"))
        while not file.exists():
            if self.clock() - since >= wait_s:
                message = f"{self.folder} holds no run (no config.yaml after {wait_s:g} s)"
                remedy = "give the directory that run.log is in, or a longer --wait"
                raise ConfigError.of("RUN_DIR", message, remedy)
            self.sleep(LOOK_S)
        refuse_other_formats(self.folder)
        config, faults = load_recorded_config(file)
        for fault in faults:
            print(on_one_line(left_out(fault)), file=sys.stderr)
        return config

    def _read_past(
        self, state: ViewState, followed: FollowedRun, summary: Summary | None, live: LiveRun | None
    ) -> None:
        """Posts what a run has written so far, at the time when it did, piece by piece.

        The run's process began when its live file says, or as long before the last row or message
        as its summary says, or else with the first one.
        """
        first = inf
        for news in _pieces(followed):
            if news.again:
                state.forget()
            first = min([first, *filter(None, _times(news))])
            self._last = max([self._last, *_times(news)])
            for row in news.rows:
                self._replay.moment = max(self._replay.moment or 0.0, row.time)
                state.post(row.step, {on_one_line(key): value for key, value in row.values.items()})
            for message in news.messages:
                state.post_message(indented(message.text))
        self._replay.moment = self._last or None
        if live is not None and summary is None:
            state.began(live.started - live.earlier_s)
        elif self._last:
            state.began(first if summary is None else self._last - summary.seconds)

    def _show_end(self, state: ViewState, summary: Summary) -> int:
        terminal = terminal_on(self.file)
        state.ended = True
        terminal.print(Display(state))
        print_end(terminal, summary, given=True)
        return ENDED

    def _follow(self, console: LiveConsole | PlainConsole, followed: FollowedRun) -> int:
        """Shows what comes until the run ends, or its process is gone."""
        while True:
            live, summary = read_live(self.folder), read_summary(self.folder)
            self._pass_on(console, followed.look(), live)
            if summary is not None:
                for news in _pieces(followed):
                    self._pass_on(console, news, None)
                console.close(summary)
                return ENDED
            gone = self._gone(live)
            if gone:
                last = max(self._last, live.time if live is not None else 0.0)
                self._replay.moment = last or None
                seconds = console.state.elapsed_s
                ended = Summary("failed", gone, console.state.step, seconds, self.folder)
                console.close(ended)
                return GONE
            self.sleep(LOOK_S)

    def _pass_on(
        self, console: LiveConsole | PlainConsole, news: News, live: LiveRun | None
    ) -> None:
        self._last = max([self._last, *_times(news)])
        if news.again:
            console.rewind()
            console.state.forget()
        for row in news.rows:
            console.log(row.step, {on_one_line(k): value for k, value in row.values.items()})
        for message in news.messages:
            console.message(indented(message.text))
        if live is not None:
            console.waits({on_one_line(p): on_one_line(wait) for p, wait in live.waits.items()})

    def _gone(self, live: LiveRun | None) -> str:
        """Why the run's process counts as gone; '' if it does not.

        Another machine's clock may differ from this one's: there the time counts from the last
        change that was seen.
        """
        now, last = self.clock(), live.time if live is not None else 0.0
        if self._last_row is None or self._last_row[0] != last:
            self._last_row = last, last if live is not None and live.is_here else now
        silent_s = now - self._last_row[1]
        if silent_s < SILENT_S or (live is not None and live.is_here and live.has_process):
            return ""
        if live is not None and not live.is_here and silent_s < LOST_S:
            return ""
        process = "its process" if live is None else f"its process {live.pid} on {live.host}"
        return (
            f"{process} is gone: it was killed, or its machine went down "
            f"(no sign of life for {silent_s:.0f} s)"
        )


def _times(news: News) -> list[float]:
    """Of its rows and messages, in seconds since the epoch; 0 where a line has none."""
    return [row.time for row in news.rows] + [message.time for message in news.messages]


def _pieces(followed: FollowedRun) -> Iterator[News]:
    """All that there is by now, as many bytes at a time as one look reads."""
    while news := followed.look():
        yield news
