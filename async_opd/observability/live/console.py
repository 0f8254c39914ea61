"""The run on a terminal (a live display) or in a log file (plain lines), and its end screen.

Both are sinks: RunLog reports their errors, of a closed terminal for example. Neither waits for a
stopped terminal or for the reader of a pipe (``async_opd.processes.output``). ``rich`` is imported
when needed.

The end screen has the commands that come after a run, as lines to be pasted into a shell.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from async_opd.config.run_config import RunConfig
from async_opd.core.errors import AsyncOPDError
from async_opd.core.printable import indented, on_one_line
from async_opd.observability.live.view_state import ViewState, accuracies
from async_opd.observability.sinks import Sink, Summary
from async_opd.observability.terminal import duration, rate, share, terminal_on
from async_opd.processes.output import NonBlockingStream, nonblocking

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
import shlex
from pathlib import Path

REFRESH_S = 1.0
"""Seconds between two frames: each takes about 4 ms of processor time."""
PLAIN_INTERVAL_S = 2.0


def open_console(
    config: RunConfig,
    clock: Callable[[], float] = time.time,
    file: TextIO | None = None,
    earlier_s: float = 0.0,
) -> LiveConsole | PlainConsole | None:
    """The console of ``log.console``, on ``file`` (stdout); None for ``off``.

    ``earlier_s`` are the seconds of the parts before, of a resumed run.
    """
    choice = config.log.console
    if choice == "off":
        return None
    if choice == "auto":
        terminal = terminal_on(file)
        choice = "live" if terminal.is_terminal and not terminal.is_dumb_terminal else "plain"
    state, stream = ViewState(config, clock), nonblocking(file or sys.stdout)
    state.began(clock() - earlier_s)
    if choice == "live":
        return LiveConsole(state, stream)
    return PlainConsole(state, stream, clock)


class LiveConsole(Sink):
    """A display that refreshes every second in a thread, whether steps arrive or not."""

    name = "console"

    def __init__(self, state: ViewState, file: TextIO | None = None) -> None:
        self.state = state
        self._file = file
        self._stopped = threading.Event()
        self._failure: Exception | None = None

    def start(self) -> None:
        """Shows the display; other output to stdout scrolls above it."""
        self._terminal = terminal_on(self._file)
        self.show()

    def show(self) -> None:
        """Shows the display, also again after ``stop``."""
        from rich.live import Live

        self._stopped.clear()
        self._live = Live(get_renderable=self.render, console=self._terminal, auto_refresh=False)
        self._live.start(refresh=True)
        self._ticker = threading.Thread(target=self._tick, name="live-console", daemon=True)
        self._ticker.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows new values. AsyncOPDError if the display's thread has failed."""
        self.state.post(step, metrics)
        if self._failure is not None:
            raise AsyncOPDError(f"the live display stopped: {self._failure}") from self._failure

    def rewind(self) -> None:
        """Shows the steps that come once more."""
        self.state.rewind()

    def waits(self, waits: Mapping[str, str]) -> None:
        """Shows what pools wait for."""
        self.state.post_waits(waits)

    def message(self, text: str) -> None:
        """Shows the text among the last messages."""
        self.state.post_message(text)

    def close(self, summary: Summary) -> str | None:
        """Leaves the last state on the terminal, and the end screen below it."""
        self.state.ended = True
        self.stop()
        print_end(self._terminal, summary)
        return _finish(self._file)

    def stop(self) -> None:
        """Leaves the last state on the terminal, whose cursor is shown again."""
        self._stopped.set()
        self._ticker.join()
        self._live.stop()

    def leave(self) -> None:
        """Ends the view of a run that goes on."""
        self.stop()
        _finish(self._file)

    def render(self) -> RenderableType:
        """The display as it is now."""
        from async_opd.observability.live.display import Display

        return Display(self.state)

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
        self, state: ViewState, file: TextIO | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        self.state = state
        self._file = file
        self._clock = clock
        self._printed_step = 0
        self._printed_at: float | None = None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Prints the step if it is new and a line is due."""
        self.state.post(step, metrics)
        now = self._clock()
        due = self._printed_at is None or now - self._printed_at >= PLAIN_INTERVAL_S
        if self.state.step > self._printed_step and (due or step >= self.state.steps):
            self._print_step(now)

    def rewind(self) -> None:
        """Prints the steps that come once more."""
        self.state.rewind()
        self._printed_step = 0

    def message(self, text: str) -> None:
        """Prints the text."""
        self._print(text)

    def close(self, summary: Summary) -> str | None:
        """Prints the last step, if it is not yet, and the end screen."""
        if self.state.step > self._printed_step:
            self._print_step(self._clock())
        print_end(terminal_on(self._file, plain=True), summary)
        return _finish(self._file)

    def leave(self) -> None:
        """Ends the view of a run that goes on."""
        _finish(self._file)

    def _print_step(self, now: float) -> None:
        self._printed_step, self._printed_at = self.state.step, now
        state = self.state
        pools = [
            f"{row.name} {rate(row.tokens_per_s)} tok/s {share(row.busy)} busy"
            for row in state.pools
            if row.tokens_per_s is not None or row.busy is not None
        ]
        parts = [f"step {state.step}/{state.steps}", _numbers(state), *pools, state.times]
        self._print("  ".join(part for part in parts if part))

    def _print(self, text: str) -> None:
        print(text, file=self._file or sys.stdout, flush=True)


def _finish(file: TextIO | None) -> str | None:
    """A message if lines are missing on the terminal."""
    if not isinstance(file, NonBlockingStream) or file.finish():
        return None
    return f"the console is not complete: {file.dropped} lines were dropped, the reader was behind"


def print_end(terminal: Console, summary: Summary, given: bool = False) -> None:
    """Prints accuracies before, after and of the teachers, the directory, status, next commands.

    ``given``: the summary may be that of somebody else's run directory.
    """
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
            table.add_row(
                on_one_line(source), *(share(of.get(source), 1) for of in (before, after, teacher))
            )
        terminal.print(table)
    terminal.print(on_one_line(f"results   {summary.run_dir}"), soft_wrap=True)
    steps = f"{summary.steps} steps in {duration(summary.seconds)}"
    style = "bold green" if summary.status == "completed" else "bold red"
    terminal.print(f"status    {summary.status}, {steps}", style=style, soft_wrap=True)
    if summary.error and summary.status == "failed":
        terminal.print(indented(f"error     {summary.error}"), soft_wrap=True)
    label = "next" if summary.status == "completed" else "continue"
    for command in next_commands(summary, given):
        terminal.print(on_one_line(f"{label:<10}{command}"), soft_wrap=True)
        label = ""


_NUMBERS = (
    ("loss", "loss/total", "{:.4g}"),
    ("grad norm", "train/grad_norm", "{:.3g}"),
    ("lr", "train/lr", "{:.3g}"),
    ("version", "sync/version", "{:.0f}"),
    ("staleness mean", "staleness/mean", "{:.2f}"),
    ("max", "staleness/max", "{:.0f}"),
    ("overlap", "perf/overlap", "{:.0%}"),
)


def _numbers(state: ViewState) -> str:
    """The scalars that have a value."""
    metrics = state.metrics
    return "  ".join(
        f"{label} {form.format(metrics[key])}" for label, key, form in _NUMBERS if key in metrics
    )


def resume_command(run_dir: Path) -> str:
    """Continues the run after its newest checkpoint, by the config in its directory."""
    config, folder = shlex.quote(f"{run_dir}/config.yaml"), shlex.quote(str(run_dir))
    return f"async_opd run {config} --run-dir {folder} --resume"


def next_commands(summary: Summary, given: bool = False) -> list[str]:
    """How a run that has not completed is continued; what the student of one that has is for.

    ``given``: the run directory may be somebody else's, whose config may name code. No command
    takes it as a config then.
    """
    run_dir = summary.run_dir
    if summary.status != "completed":
        return [] if given else [resume_command(run_dir)]
    config, folder = shlex.quote(f"{run_dir}/config.yaml"), shlex.quote(str(run_dir))
    evaluated = not given and any(key.startswith("eval/") for key in summary.metrics)
    return [
        f"async_opd report {folder}",
        *([f"async_opd eval {config} {folder} eval.n=4 eval.temperature=0.7"] if evaluated else []),
        f"async_opd export {folder} {shlex.quote(f'{run_dir.name}-student')}",
    ]
