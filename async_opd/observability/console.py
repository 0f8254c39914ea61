"""The run on a terminal (a live display) or in a log file (plain lines), and its end screen.

Both are sinks: RunLog reports their errors, of a closed terminal for example. Neither waits for a
stopped terminal or for the reader of a pipe (``async_opd.processes.output``). ``rich`` is imported
when needed.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TextIO

from async_opd.config.run_config import RunConfig
from async_opd.core.errors import AsyncOPDError
from async_opd.core.printable import escaped
from async_opd.observability.console_state import Dashboard, accuracies
from async_opd.observability.sinks import Sink, Summary
from async_opd.processes.output import NonBlockingStream, nonblocking

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.text import Text

REFRESH_S = 0.25
PLAIN_INTERVAL_S = 2.0
PLAIN_WIDTH = 100


def open_console(
    config: RunConfig, clock: Callable[[], float] = time.time, file: TextIO | None = None
) -> LiveConsole | PlainConsole | None:
    """The console of ``log.console``, on ``file`` (stdout); None for ``off``."""
    choice = config.log.console
    if choice == "off":
        return None
    if choice == "auto":
        terminal = terminal_on(file)
        choice = "live" if terminal.is_terminal and not terminal.is_dumb_terminal else "plain"
    dashboard, stream = Dashboard(config, clock), nonblocking(file or sys.stdout)
    if choice == "live":
        return LiveConsole(dashboard, stream)
    return PlainConsole(dashboard, stream, clock)


class LiveConsole(Sink):
    """A display that refreshes 4 times a second in a thread, whether steps arrive or not."""

    name = "console"

    def __init__(self, dashboard: Dashboard, file: TextIO | None = None) -> None:
        self.dashboard = dashboard
        self._file = file
        self._stopped = threading.Event()
        self._failure: Exception | None = None

    def start(self) -> None:
        """Shows the display; other output to stdout scrolls above it."""
        from rich.live import Live

        self._terminal = terminal_on(self._file)
        self._live = Live(get_renderable=self.render, console=self._terminal, auto_refresh=False)
        self._live.start(refresh=True)
        self._ticker = threading.Thread(target=self._tick, name="live-console", daemon=True)
        self._ticker.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows new values. AsyncOPDError if the display's thread has failed."""
        self.dashboard.post(step, metrics)
        if self._failure is not None:
            raise AsyncOPDError(f"the live display stopped: {self._failure}") from self._failure

    def waits(self, waits: Mapping[str, str]) -> None:
        """Shows what pools wait for."""
        self.dashboard.post_waits(waits)

    def message(self, text: str) -> None:
        """Shows the text among the last messages."""
        self.dashboard.post_message(text)

    def close(self, summary: Summary) -> str | None:
        """Leaves the last state on the terminal, and the end screen below it."""
        self._stopped.set()
        self._ticker.join()
        self._live.stop()
        print_end(self._terminal, summary)
        return _finish(self._file)

    def render(self) -> RenderableType:
        """The display as it is now."""
        from rich.console import Group
        from rich.text import Text

        dashboard = self.dashboard
        lines = [Text(text, style="dim", no_wrap=True) for text in dashboard.messages]
        facts = [
            Text(fact)
            for fact in (_numbers(dashboard), _topics(dashboard), _eval(dashboard))
            if fact
        ]
        return Group(_progress(dashboard), _stages(dashboard), *facts, *lines)

    def _tick(self) -> None:
        while not self._stopped.wait(REFRESH_S):
            if isinstance(self._file, NonBlockingStream) and self._file.waiting:
                continue  # the terminal has not taken the previous frame yet
            try:
                self._live.refresh()
            except Exception as error:
                self._failure = error
                return


class PlainConsole(Sink):
    """Plain lines: messages, and at most one step every 2 s, the first and last always."""

    name = "console"

    def __init__(
        self,
        dashboard: Dashboard,
        file: TextIO | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.dashboard = dashboard
        self._file = file
        self._clock = clock
        self._printed_step = 0
        self._printed_at: float | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the step if it is new and a line is due."""
        self.dashboard.post(step, metrics)
        now = self._clock()
        due = self._printed_at is None or now - self._printed_at >= PLAIN_INTERVAL_S
        if self.dashboard.step > self._printed_step and (due or step >= self.dashboard.steps):
            self._print_step(now)

    def message(self, text: str) -> None:
        """Prints the text."""
        self._print(text)

    def close(self, summary: Summary) -> str | None:
        """Prints the last step, if it is not yet, and the end screen."""
        if self.dashboard.step > self._printed_step:
            self._print_step(self._clock())
        print_end(terminal_on(self._file, plain=True), summary)
        return _finish(self._file)

    def _print_step(self, now: float) -> None:
        self._printed_step, self._printed_at = self.dashboard.step, now
        dashboard = self.dashboard
        pools = [
            f"{row.name} {_rate(row.tokens_per_s)} tok/s {_share(row.busy)} busy"
            for row in dashboard.stages
            if row.tokens_per_s is not None or row.busy is not None
        ]
        parts = [
            f"step {dashboard.step}/{dashboard.steps}",
            _numbers(dashboard),
            *pools,
            _times(dashboard),
        ]
        self._print("  ".join(part for part in parts if part))

    def _print(self, text: str) -> None:
        print(text, file=self._file or sys.stdout, flush=True)


def _finish(file: TextIO | None) -> str | None:
    """A message if lines are missing on the terminal."""
    if not isinstance(file, NonBlockingStream) or file.finish():
        return None
    return f"the console is not complete: {file.dropped} lines were dropped, the reader was behind"


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
    if plain:
        options |= {"force_terminal": False, "color_system": None, "width": PLAIN_WIDTH}
    return Terminal(file=file, **options)


def print_end(terminal: Console, summary: Summary) -> None:
    """Prints accuracies before, after and of the teachers, the run directory, and the status."""
    from rich.table import Table

    before, after, teacher = (
        accuracies(summary.metrics, prefix) for prefix in ("eval_initial", "eval", "eval_teacher")
    )
    sources = list(dict.fromkeys([*before, *after, *teacher]))
    if sources:
        table = Table("data source", title="accuracy", title_justify="left")
        for column in ("before", "after", "teacher"):
            table.add_column(column, justify="right")
        for source in sources:
            table.add_row(source, *(_share(of.get(source), 1) for of in (before, after, teacher)))
        terminal.print(table)
    terminal.print(f"results   {summary.run_dir}", soft_wrap=True)
    steps = f"{summary.steps} steps in {duration(summary.seconds)}"
    style = "bold green" if summary.status == "completed" else "bold red"
    terminal.print(f"status    {summary.status}, {steps}", style=style, soft_wrap=True)
    if summary.error:
        terminal.print(f"error     {summary.error}", soft_wrap=True)


def _progress(dashboard: Dashboard) -> RenderableType:
    from rich.progress_bar import ProgressBar
    from rich.table import Table

    grid = Table.grid(padding=(0, 1), expand=True)
    grid.add_column(no_wrap=True)
    grid.add_column(ratio=1)
    grid.add_column(no_wrap=True)
    bar = ProgressBar(total=dashboard.steps, completed=min(dashboard.step, dashboard.steps))
    grid.add_row(f"step {dashboard.step}/{dashboard.steps}", bar, _times(dashboard))
    return grid


def _stages(dashboard: Dashboard) -> RenderableType:
    from rich import box
    from rich.table import Table

    table = Table("stage", box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("tokens/s", justify="right")
    table.add_column("busy", justify="right")
    table.add_column("waits for", no_wrap=True, ratio=1)
    for row in dashboard.stages:
        table.add_row(row.name, _rate(row.tokens_per_s), _share(row.busy), row.waits_for)
    return table


_NUMBERS = (
    ("loss", "loss/total", "{:.4g}"),
    ("grad norm", "train/grad_norm", "{:.3g}"),
    ("lr", "train/lr", "{:.3g}"),
    ("version", "sync/version", "{:.0f}"),
    ("staleness mean", "staleness/mean", "{:.2f}"),
    ("max", "staleness/max", "{:.0f}"),
    ("overlap", "perf/overlap", "{:.0%}"),
)


def _numbers(dashboard: Dashboard) -> str:
    """The scalars that have a value."""
    metrics = dashboard.metrics
    return "  ".join(
        f"{label} {form.format(metrics[key])}" for label, key, form in _NUMBERS if key in metrics
    )


def _topics(dashboard: Dashboard) -> str:
    rows = [
        f"{row.name} {row.ready:.0f} ready, {row.leased:.0f} leased" for row in dashboard.topics
    ]
    return "queue  " + "  |  ".join(rows) if rows else ""


def _eval(dashboard: Dashboard) -> str:
    rows = [f"{source} {accuracy:.1%}" for source, accuracy in dashboard.accuracies.items()]
    return "accuracy  " + "  ".join(rows) if rows else ""


def _times(dashboard: Dashboard) -> str:
    left = dashboard.left_s
    remaining = duration(left) if left is not None else "?"
    return f"{duration(dashboard.elapsed_s)} elapsed, {remaining} left"


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value / 1000:.1f}k" if value >= 10_000 else f"{value:.0f}"


def _share(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}%}"


def duration(seconds: float) -> str:
    """``h:mm:ss``."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
