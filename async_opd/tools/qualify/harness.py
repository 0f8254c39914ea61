"""Runs rows, each in a forked process with a limit of time, and writes the report after each.

    {"machine": GPUs, versions, "rows": {name: {"shows", "command", "criterion", "outcome", "why",
     "seconds", "cells", "output"}}}

``outcome`` is ``passed``, ``failed``, ``could not run``, or ``incomplete`` where the time was over
before all cells were measured; ``why`` has the reasons of all but the first; ``output`` is the end
of the output of a row that has not passed.
"""

from __future__ import annotations

import datetime
import importlib
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_opd.config.device_defaults import ALLOCATOR
from async_opd.config.secrets import Redactor
from async_opd.core.errors import ConfigError, StageError
from async_opd.core.printable import escaped
from async_opd.tools.qualify.rows import ROWS, GpuRow, named

PASSED, FAILED, COULD_NOT, INCOMPLETE = "passed", "failed", "could not run", "incomplete"
GRACE_S = 10.0
"""Seconds before its limit in which a row begins no further cell, and those in which its processes
may end after SIGTERM."""
MACHINE_S = 120.0
OUTPUT_LINES = 60
Found = dict[str, Any]


@dataclass
class ReportFile:
    """The report in its file."""

    path: Path
    machine: Found
    rows: dict[str, Found]

    def write(self) -> None:
        """Replaces the file."""
        part = self.path.with_name(f"{self.path.name}.part")
        part.write_text(json.dumps({"machine": self.machine, "rows": self.rows}, indent=1))
        part.replace(self.path)

    def measure(self, names: Sequence[str], again: bool, minutes: float) -> list[str]:
        """Measures the rows, with a line for each; returns those for which there was no time.

        Rows that have passed or failed before are measured ``again``, or left as they are; one
        that was incomplete gets twice its minutes.
        """
        ends, left = time.monotonic() + 60 * minutes, []
        for name in names:
            row, before = ROWS[name], self.rows.get(name, {}).get("outcome")
            if before == INCOMPLETE:
                row = replace(row, minutes=2 * row.minutes)
            if before in (PASSED, FAILED) and not again:
                continue
            if lacking(row, self.machine) == "" and time.monotonic() + 60 * row.minutes > ends:
                left.append(name)
                continue
            with tempfile.TemporaryDirectory() as folder:
                found = measured(name, row, self.machine, Path(folder) / "log")
            self.rows[name] = found
            self.write()
            why = "".join(f"\n    {escaped(line)}" for line in found["why"])
            took = f", {found['seconds']:g} s" if "seconds" in found else ""
            print(f"{name}: {found['outcome']}{took}{why}", flush=True)
        return left


def report_in(path: Path, machine: Found) -> ReportFile:
    """The report that the file has, or a new one.

    ConfigError for one of another machine, and for a path that cannot be read.
    """
    try:
        report = json.loads(path.read_text())
        before, rows = dict(report["machine"]), dict(report["rows"])
    except FileNotFoundError:
        return ReportFile(path, machine, {})
    except OSError as error:
        message = f"cannot be read: {error.strerror}"
        raise ConfigError.of("", message, "give another --out", str(path)) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError.of(
            "", f"is not a report of qualify: {error}", "give another --out", str(path)
        ) from error
    differs = [key for key in ("device_name", "versions") if before.get(key) != machine.get(key)]
    if differs:
        found = "; ".join(f"{key} {before.get(key)}, here {machine.get(key)}" for key in differs)
        raise ConfigError.of("", f"is of another machine: {found}", "give another --out", str(path))
    return ReportFile(path, machine, rows)


def machine_of(gpus: int | None) -> Found:
    """GPUs and versions, with at most ``gpus`` GPUs. ConfigError if there are fewer."""
    if gpus is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        named = list(map(str, range(gpus))) if visible is None else visible.split(",")
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(named[:gpus])
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        ended = forked(log, MACHINE_S, _print_machine)
        found = next(parsed(log, "machine"), None)
        if found is None:
            cause = f"torch does not answer: {ended}\n{_tail(log)}"
            raise StageError("qualify", cause, "repair the installation of torch")
    if gpus is not None and found["gpus"] < gpus:
        message = f"is {gpus}, and torch finds {found['gpus']} GPUs"
        raise ConfigError.of("--gpus", message, "give a smaller number")
    return found


def _print_machine() -> None:
    from async_opd.tools.qualify.measurements.measuring import machine

    print(json.dumps({"machine": machine()}), flush=True)


def lacking(row: GpuRow, machine: Found) -> str:
    """Why the row cannot run here; empty if it can."""
    absent = [name for name in row.packages if importlib.util.find_spec(name) is None]
    if absent:
        return f"it needs {' and '.join(absent)}, not installed here"
    if row.gpus > machine["gpus"] and (machine["gpus"] or not row.cpu):
        return f"it needs {row.gpus} GPU{'s' * (row.gpus > 1)}, and torch finds {machine['gpus']}"
    return ""


def measured(name: str, row: GpuRow, machine: Found, log: Path) -> Found:
    """The row's part of the report. ``log``: the file for all that it prints."""
    about = {
        "shows": row.shows,
        "command": f"async_opd qualify --only {name} --out report.json",
        "criterion": row.criterion(),
    }
    if why_not := lacking(row, machine):
        return {**about, "outcome": COULD_NOT, "why": [why_not], "cells": []}
    started, limit_s = time.monotonic(), 60 * row.minutes
    ended = forked(log, limit_s, lambda: _main(row, machine["device"], limit_s - GRACE_S))
    cells = list(parsed(log, "cell"))
    skipped = [cell["skipped"] for cell in cells if "skipped" in cell]
    later = [f"not reached: {named(cell)}" for cell in cells if "not_reached" in cell]
    if cells and len(skipped) == len(cells) and not ended:
        outcome, why = COULD_NOT, skipped
    elif why := row.broken(cells, machine["device"]) + [ended] * bool(ended):
        outcome = FAILED
    else:
        outcome, why = INCOMPLETE if later else PASSED, later
    return {
        **about,
        "outcome": outcome,
        "why": list(dict.fromkeys(why)),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "seconds": round(time.monotonic() - started, 1),
        "cells": cells,
        **({} if outcome == PASSED else {"output": _tail(log)}),
    }


def _main(row: GpuRow, device: str, seconds: float) -> None:
    import torch

    from async_opd.tools.qualify.measurements.measuring import Report

    if device == "cpu":
        torch.set_num_threads(1)
    main = importlib.import_module(f"async_opd.tools.qualify.measurements.{row.module}").main
    main(Report(torch.device(device), seconds), *row.given)


def forked(log: Path, limit_s: float, work: Callable[[], None]) -> str:
    """Runs the work in another process, which prints into ``log``; how it ended, '' if well.

    The process leads a group, which is ended with it: engines are processes, too. SIGTERM ends both
    and raises SystemExit.
    """
    process = multiprocessing.get_context("fork").Process(target=_logged, args=(log, work))
    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        with _sigterm_later():
            process.start()
        process.join(limit_s)
        if process.exitcode is None:
            return f"stopped after its {limit_s:.0f} s"
        return f"exit code {process.exitcode}" if process.exitcode else ""
    finally:
        with _sigterm_later():
            _end(process)
            signal.signal(signal.SIGTERM, before)


def _terminated(*_: object) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # another one would leave the group alive
    sys.exit(128 + signal.SIGTERM)


@contextmanager
def _sigterm_later() -> Iterator[None]:
    """SIGTERM comes after the block, and not to a process between its fork and its group's end."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def _end(process: Any) -> None:
    if process.pid is None:
        return  # it did not start
    for sent in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sent)
        except ProcessLookupError:  # nothing is left of the group
            break
        process.join(GRACE_S)
    process.kill()  # if it did not lead its group yet
    process.join()


def _logged(log: Path, work: Callable[[], None]) -> None:
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    with log.open("w") as file:
        for descriptor in (1, 2):
            os.dup2(file.fileno(), descriptor)
    # stays open after the work: multiprocessing prints the traceback of its error there
    sys.stdout = sys.stderr = os.fdopen(1, "w", buffering=1)
    work()


def parsed(log: Path, kind: str) -> Iterator[Found]:
    """The values of the objects ``{kind: value}`` that were printed, at most one a line."""
    for line in log.read_text(errors="replace").splitlines():
        at = line.find(f'{{"{kind}": ')  # a progress bar may stand before it
        if at >= 0:
            with suppress(ValueError):
                yield json.JSONDecoder().raw_decode(line, at)[0][kind]


def _tail(log: Path) -> str:
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if '{"cell": ' not in line
    ]
    return Redactor()("\n".join(lines[-OUTPUT_LINES:]))


def preload(device: str) -> None:
    """Sets torch's allocator as the trainer does, and imports what all rows need, once."""
    os.environ.update({**ALLOCATOR[device], **os.environ})
    if importlib.util.find_spec("transformers") is None:
        cause, remedy = "transformers is not installed", "pip install transformers"
        raise StageError("qualify", cause, remedy)
    importlib.import_module("transformers")
