"""The command line, called in process: what a user would see, and that it ends."""

from __future__ import annotations

import contextlib
import io
import re
import signal
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from async_opd.cli import BUG, main

ROOT = Path(__file__).parents[2]
STUDENT = ROOT / "examples" / "quickstart" / "models" / "student"
LONGEST_S = 20
ROW = '{"prompt": "sort 210=", "data_source": "sort", "answer": "012"}\n'


@dataclass(frozen=True)
class Said:
    """How the command ended, and what it printed."""

    code: int
    out: str
    err: str


def command(*arguments: str) -> Said:
    """Runs ``async_opd ARGUMENTS``. AssertionError if it ends with a bug of async_opd."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), bounded():
        try:
            code = main(arguments)
        except SystemExit as error:  # argparse
            code = int(str(error.code))
    assert BUG not in err.getvalue(), err.getvalue()
    return Said(code, out.getvalue(), err.getvalue())


def checked(file: Path, *overrides: str) -> Said:
    """``async_opd check``: it works, or names every problem with where it is."""
    said = command("check", str(file), *overrides)
    assert said.code in (0, 2), said
    if said.code == 2:
        assert re.match(r"\d+ problems? with the input:\n  1\. .*: .", said.err), said.err
        assert "Traceback" not in said.err
        said.err.encode()
    return said


class TooLong(BaseException):
    """Nothing but a test catches it."""


@contextlib.contextmanager
def bounded() -> Iterator[None]:
    """TooLong in what takes too long: ``LONGEST_S`` of processor time, or ten times as long.

    The signal may come at an instruction that has no line, and pytest ends its whole run with an
    internal error when it shows such a frame: the error has the frames as text.
    """

    def stop(*_: Any) -> None:
        raise TooLong

    timers = (
        (signal.SIGPROF, signal.ITIMER_PROF, LONGEST_S),
        (signal.SIGALRM, signal.ITIMER_REAL, 10 * LONGEST_S),
    )
    before = [signal.signal(number, stop) for number, _, _ in timers]
    try:
        for _, timer, seconds in timers:
            signal.setitimer(timer, seconds)
        yield
    except TooLong as late:
        where = "".join(traceback.format_tb(late.__traceback__))
        raise TooLong(f"it took longer than {LONGEST_S} s, here:\n{where}") from None
    finally:
        for (number, timer, _), handler in zip(timers, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def good(folder: Path) -> dict[str, Any]:
    """A config without a fault, and its data."""
    (folder / "train.jsonl").write_text(ROW)
    return {
        "name": "fuzzed",
        "student": {"model": str(STUDENT)},
        "teachers": {"sort": {"model": str(STUDENT)}},
        "data": {"train": ["train.jsonl"], "eval": ["train.jsonl"]},
        "rollout": {"n": 2, "max_tokens": 8},
        "loss": {"kind": "forward_kl", "top_k": 4},
        "train": {"steps": 2, "batch_size": 4, "lr": 1e-3},
        "async": {"staleness_threshold": 0.5, "sync_steps": 1},
        "log": {"wandb": "off"},
    }


def written(folder: Path, config: Any) -> Path:
    """The config's file."""
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(config))
    return file
