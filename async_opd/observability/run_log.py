"""The record of a run: files that must be written, and sinks that may fail.

    log ──┬──► metrics.jsonl           message ──┬──► run.log         finish ──► summary.json
          └──► sinks (wandb, console)            └──► sinks                  └──► sinks close
    dead_letter ──► dead_letters.jsonl, which the first dead letter creates

All methods are called from the driver's event loop. A file that cannot be written ends the run with
StageError, and a run whose record is incomplete never ends as completed. A sink that fails is
reported once, counted (``log/sink_failures``), and ends the run only if it is ``required``.

``EventForwarder`` writes the events of stages to ``run.log``, also while no step ends.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TextIO

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import Redactor
from async_opd.core.errors import AsyncOPDError, StageError
from async_opd.core.printable import indented, on_one_line
from async_opd.core.reports import Interval, Level
from async_opd.core.samples import DeadLetter
from async_opd.core.stages import LOG, Log, Queue, Rollouter, TeacherScorer
from async_opd.files.foreign import foreign
from async_opd.files.lines import MOST_S, append_line, end_torn_line, json_object, number_of
from async_opd.files.safe_open import make_folder, regular_file, write_atomically
from async_opd.observability.live.live_file import read_live
from async_opd.observability.loggers import logger_sinks
from async_opd.observability.sinks import Sink, Status, Summary
from async_opd.observability.trace import TraceSink
from async_opd.observability.wandb_sink import WandbSink
from async_opd.processes.output import write_stderr
from async_opd.waiting.deadline import gather_or_cancel
from async_opd.waiting.waits import EVERY_S, WAITING, named

METRICS, DEAD_LETTERS = "metrics.jsonl", "dead_letters.jsonl"
RUN_LOG, SUMMARY = "run.log", "summary.json"
SINK_FAILURES = "log/sink_failures"
LEVELS: tuple[Level, ...] = ("info", "warning", "error")
_ABOUT = re.compile(
    r"(?P<stage>student|trainer|teacher [^\s/:]+|rollouter|scorer|queue)(/\d+)?[ :]"
)
_STAGES = {"student": "rollout", "rollouter": "rollout", "trainer": "train"}


def is_shown(level: Level, least: Level) -> bool:
    """Whether a message of this level is at least of the level ``least``."""
    return LEVELS.index(level) >= LEVELS.index(least)


def text_line(moment: str, level: Level, text: str) -> str:
    """The line, whose level is named unless it is ``info``."""
    return f"{moment} {text}" if level == "info" else f"{moment} {level.upper()} {text}"


def json_line(moment: str, level: Level, text: str) -> str:
    """The object on one line. Stage and replica are those that the text begins with, or ''."""
    about = _ABOUT.match(text)
    stage = about["stage"] if about else ""
    entry = {
        "time": moment,
        "level": level,
        "stage": _STAGES.get(stage, stage.replace("teacher ", "teacher/")),
        "replica": stage + about[2] if about and about[2] else "",
        "text": text,
    }
    return json.dumps(entry)


class RunLog:
    """Writes a run directory's ``metrics.jsonl``, ``run.log`` and ``summary.json``.

    A context manager: leaving it without ``finish`` finishes the run by the exception, if any.
    ``sinks`` replaces those the config asks for; they are closed in order, and ``viewers`` after
    them: these show the messages of closing the others. ``before`` are the last metrics of the run
    that is resumed, None in a new run, ``earlier_s`` the seconds of its parts.
    """

    def __init__(
        self,
        config: RunConfig,
        run_dir: Path,
        clock: Callable[[], float] = time.time,
        sinks: list[Sink] | None = None,
        before: Mapping[str, float] | None = None,
        viewers: Sequence[Sink] = (),
        earlier_s: float = 0.0,
    ) -> None:
        self.failures = 0
        self._earlier_s = earlier_s
        self._run_dir = run_dir
        self._clock = clock
        self._redacted = Redactor(config.model_dump(mode="json", by_alias=True))
        self._format = config.log
        self._quiet = config.log.console == "off"
        configured = partial(_configured, config, run_dir, clock, resumed=before is not None)
        self._wanted = [*(configured() if sinks is None else sinks), *viewers]
        self._sinks: list[Sink] = []
        self._reported: set[str] = set()
        self._notes: dict[str, str] = {}
        self._not_finite: set[str] = set()
        self.last: dict[str, float] = dict(before or {})
        self._summarized: dict[str, float] = {}
        self._steps = 0
        self._dead_letter_stages: set[str] = set()
        self._status: Status | None = None
        self._unwritten: str | None = None

    def __enter__(self) -> Self:
        """Opens the files (appending) and starts the sinks, which may take a while."""
        make_folder(self._run_dir)
        self._started = self._clock()
        self._metrics_file = self._open(METRICS)
        self._messages_file = self._open(RUN_LOG)
        for sink in reversed(self._wanted):
            if self._noted(sink, lambda sink: sink.start()):
                self._sinks.insert(0, sink)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Finishes the run if ``finish`` was not called."""
        if error is None:
            self.finish("failed", "the run's log was closed before the run had ended")
        elif isinstance(error, KeyboardInterrupt | asyncio.CancelledError):
            self.finish("interrupted")
        else:
            self.finish("failed", f"{type(error).__name__}: {error}")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Writes one line and forwards it. A step may come several times, with other metrics."""
        self._steps = max(self._steps, step)
        self._warn(metrics)
        if self.failures:
            metrics = {**metrics, SINK_FAILURES: float(self.failures)}
        self.last |= metrics
        line = {"step": step, "time": self._clock(), **_finite(metrics)}
        with _written(self._metrics_file.name):
            self._metrics_file.write(json.dumps(line, allow_nan=False) + "\n")
        named = {on_one_line(key): value for key, value in metrics.items()}
        self._each(lambda sink: sink.log(step, named))

    def rewind(self, before: Mapping[str, float]) -> None:
        """Called when the run goes back to a checkpoint, to which its files were cut.

        ``before`` as in ``__init__``.
        """
        self._metrics_file.close()
        self._metrics_file = self._open(METRICS)
        self.last = dict(before)
        self._summarized = {k: v for k, v in self._summarized.items() if k not in before}
        self._steps = 0
        self._each(lambda sink: sink.rewind())

    def summarize(self, metrics: Mapping[str, float]) -> None:
        """Keeps the values for the summary, where they replace logged ones."""
        self._summarized |= metrics

    def checkpoint(self, step: int, folder: Path) -> None:
        """Passes to the sinks that a checkpoint is complete."""
        self._each(lambda sink: sink.checkpoint(step, folder))

    def waits(self, waits: Mapping[str, str]) -> None:
        """Passes to the sinks what each pool waits for ('' if it computes)."""
        named = {on_one_line(pool): on_one_line(wait) for pool, wait in waits.items()}
        self._each(lambda sink: sink.waits(named))

    def busy(self, pools: Mapping[str, Sequence[Interval]]) -> None:
        """Passes to the sinks the intervals in which each pool computed since the last call."""
        self._each(lambda sink: sink.busy(pools))

    def message(self, text: str, level: Level = "info") -> None:
        """Writes a line to ``run.log``, with the time, and to the sinks, from ``log.level`` on.

        Secrets are hidden, control characters escaped, and all lines but the first indented.
        """
        if not is_shown(level, self._format.level):
            return
        text = indented(self._redacted(text))
        self._each(lambda sink: sink.message(text))
        with _written(self._messages_file.name):
            self._messages_file.write(self._line(text, level))

    def _line(self, text: str, level: Level) -> str:
        moment = datetime.fromtimestamp(self._clock()).astimezone().isoformat(timespec="seconds")
        as_line = json_line if self._format.format == "json" else text_line
        return as_line(moment, level, text) + "\n"

    def dead_letter(self, letter: DeadLetter) -> None:
        """Writes a line to ``dead_letters.jsonl``; the first one of each stage is a message too."""
        if letter.stage not in self._dead_letter_stages:
            self._dead_letter_stages.add(letter.stage)
            about = f"{letter.header.uid} ({letter.stage}): {letter.reason}"
            self.message(f"dead-lettered {about}", "warning")
        header = letter.header
        line = {"time": self._clock(), "uid": header.uid, "teacher": header.teacher}
        line |= {
            "tokens": header.tokens,
            "stage": letter.stage,
            "reason": self._redacted(letter.reason),
        }
        line |= {"turns": header.turns} if header.episode else {}
        path = self._run_dir / DEAD_LETTERS
        with _written(str(path)), open(path, "ab", buffering=0, opener=regular_file) as file:
            append_line(file, json.dumps(line).encode() + b"\n")

    def finish(self, status: Status, error: str | None = None) -> Status:
        """Writes ``summary.json`` and closes the sinks; later calls do nothing. Never raises.

        The summary is written before the sinks are closed, and again if closing one failed. A run
        whose record cannot be written has failed, which standard error says in any case. Returns
        the status that the run has in the end.
        """
        if self._status is not None:
            return self._status
        self._status = status
        error = None if error is None else self._redacted(error)
        with self._failing_if_unwritten():
            level: Level = "error" if status == "failed" else "info"
            self.message(f"{status}: {error}" if error else status, level)
        if self._quiet and status == "failed":
            write_stderr(indented(f"failed: {error}"))
        with self._failing_if_unwritten():
            self._write_summary(status, error)
        summary = _printable(self._summary(status, error))
        written = self.failures, status, dict(self._summarized), dict(self._notes)
        for sink in self._sinks:
            with self._failing_if_unwritten():
                self._noted(sink, lambda sink: sink.close(summary))
        for file in (self._metrics_file, self._messages_file):
            with self._failing_if_unwritten(), _written(file.name):
                file.close()
        if (self.failures, self._status, self._summarized, self._notes) != written:
            with self._failing_if_unwritten():
                self._write_summary(self._status, error or self._unwritten)
        return self._status

    @contextmanager
    def _failing_if_unwritten(self) -> Iterator[None]:
        """Makes the run a failed one if the block cannot write."""
        try:
            yield
        except (OSError, StageError) as error:
            self._status, self._unwritten = "failed", self._redacted(str(error))
            write_stderr(indented(f"failed: {self._unwritten}"))

    def give_up(self, status: Status, error: str) -> None:
        """``finish`` for a process that is killed: sinks get no message and are not closed."""
        if self._status is None:
            with self._failing_if_unwritten():
                self._messages_file.write(self._line(indented(f"{status}: {error}"), "error"))
                self._write_summary(status, error)

    def _open(self, name: str) -> TextIO:
        """Opens a file line-buffered: a process that is killed loses no line."""
        path = self._run_dir / name
        end_torn_line(path)
        return open(path, "a", encoding="utf-8", buffering=1, opener=regular_file)

    def _write_summary(self, status: Status, error: str | None) -> None:
        summary = self._summary(status, error)
        content = asdict(summary) | {"run_dir": str(self._run_dir)}
        del content["metrics"]
        content |= _finite(summary.metrics)  # metric names have a slash: they replace no other key
        text = json.dumps(content, indent=2, allow_nan=False)
        with _written(str(self._run_dir / SUMMARY)):
            write_atomically(self._run_dir / SUMMARY, text + "\n")

    def _summary(self, status: Status, error: str | None) -> Summary:
        return Summary(
            status=status,
            error=error,
            steps=self._steps,
            seconds=self._earlier_s + self._clock() - self._started,
            run_dir=self._run_dir,
            metrics=self.last | self._summarized | {SINK_FAILURES: float(self.failures)},
            notes=dict(self._notes),
        )

    def _warn(self, metrics: Mapping[str, float]) -> None:
        """Writes a message for the first value of each metric that is not finite."""
        for key, value in metrics.items():
            if not math.isfinite(value) and key not in self._not_finite:
                self._not_finite.add(key)
                words = f"{key} is {value}; metrics.jsonl has null where it is not finite"
                self.message(words, "warning")

    def _each(self, call: Callable[[Sink], None]) -> None:
        for sink in self._sinks:
            self._guard(sink, call)

    def _noted(self, sink: Sink, call: Callable[[Sink], str | None]) -> bool:
        """As ``_guard``; the text that the sink returns becomes a message."""
        notes: list[str | None] = []
        with self._waiting_for(sink):
            succeeded = self._guard(sink, lambda sink: notes.append(call(sink)))
        for note in filter(None, notes):
            known = self._notes.get(sink.name)
            self._notes[sink.name] = "; ".join(filter(None, [known, self._redacted(note)]))
            self.message(note, "warning")
        return succeeded

    @contextmanager
    def _waiting_for(self, sink: Sink) -> Iterator[None]:
        """Lines of ``run.log`` from another thread, since the sink keeps this one waiting."""
        over, since = threading.Event(), time.monotonic()
        bound_s = getattr(sink, "longest_s", math.inf)

        def write_waits() -> None:
            while is_shown("info", self._format.level) and not over.wait(EVERY_S):
                words = named(sink.name, time.monotonic() - since, bound_s)
                with suppress(OSError):  # the next message is an error
                    self._messages_file.write(self._line(WAITING + words, "info"))

        thread = threading.Thread(target=write_waits, name="waits", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _guard(self, sink: Sink, call: Callable[[Sink], None]) -> bool:
        """Whether the call succeeded. Failures are counted, a sink's first one is reported."""
        try:
            call(sink)
        except Exception as error:
            self.failures += 1
            if isinstance(error, StageError) and getattr(sink, "required", False):
                raise
            if getattr(sink, "required", False):
                cause = f"{type(error).__name__}: {error}"
                remedy = "mend the code that was given to the run"
                raise StageError(sink.name, cause, remedy) from error
            if sink.name not in self._reported:
                self._reported.add(sink.name)
                self.message(
                    f"{sink.name} failed: {type(error).__name__}: {error} (the run goes on, "
                    f"metrics.jsonl is complete; further failures are counted in {SINK_FAILURES})",
                    "warning",
                )
            return False
        return True


@contextmanager
def _written(file: str) -> Iterator[None]:
    """StageError that names the file if it cannot be written."""
    try:
        yield
    except OSError as error:
        cause = f"{file} cannot be written: {error.strerror or error}"
        raise StageError(LOG, cause, "make room on its disk, or choose another run_dir") from error


def _configured(
    config: RunConfig, run_dir: Path, clock: Callable[[], float], resumed: bool
) -> list[Sink]:
    """The sinks of the config."""
    sinks: list[Sink] = [TraceSink(run_dir, clock, resumed)]
    if config.log.wandb != "off":
        sinks.append(WandbSink(config, run_dir, resumed))
    return [*sinks, *logger_sinks(config, run_dir, resumed)]


def _printable(summary: Summary) -> Summary:
    """The summary with control characters escaped; ``summary.json`` has it unescaped."""
    return replace(
        summary,
        error=summary.error and indented(summary.error),
        run_dir=Path(on_one_line(str(summary.run_dir))),
        metrics={on_one_line(key): value for key, value in summary.metrics.items()},
    )


def _finite(metrics: Mapping[str, float]) -> dict[str, float | None]:
    return {key: value if math.isfinite(value) else None for key, value in metrics.items()}


LAST_EVENTS_S = 5.0
"""Seconds that a failing run waits for the last events of stages that may have died."""
Stage = Queue | Rollouter | TeacherScorer
"""A stage that has events."""


@dataclass(eq=False)
class EventForwarder:
    """Asks each stage for the events after those it has seen."""

    log: Log
    _seen: Counter[int] = field(default_factory=Counter, init=False)  # by id() of the stage

    async def forward(self, stage: Stage) -> None:
        """Writes the stage's events as they come, until cancelled."""
        while True:
            await self._forward_once(stage)

    async def forward_last(self, *stages: Stage) -> None:
        """Writes the events before the error that ends the run, which may explain it."""
        await gather_or_cancel(*map(self._forward_rest, stages))  # all may be on a lost machine

    async def _forward_rest(self, stage: Stage) -> None:
        with suppress(AsyncOPDError, TimeoutError):
            async with asyncio.timeout(LAST_EVENTS_S):
                while await self._forward_once(stage, wait=False):
                    pass

    async def _forward_once(self, stage: Stage, wait: bool = True) -> bool:
        """Forwards the next events; whether there were any."""
        events = await stage.events(self._seen[id(stage)], wait)
        self._seen[id(stage)] = events.seen
        for line in events.lines:
            self.log.message(line, "info" if line.startswith(WAITING) else "warning")
        return bool(events.lines)


def seconds_so_far(run_dir: Path) -> float:
    """Seconds of the parts of a run so far, by its summary; of a killed one by its live file."""
    with suppress(OSError):
        summary = json_object((foreign(run_dir) / SUMMARY).read().decode(errors="replace")) or {}
        seconds = number_of(summary.get("seconds"))
        if seconds is not None and 0 <= seconds <= MOST_S:
            return seconds
    live = read_live(run_dir)
    return 0.0 if live is None else max(live.elapsed_s, 0.0)
