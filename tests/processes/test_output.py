"""Output into a real pipe: no writer waits for the reader; it gets the number of lost lines."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from async_opd.processes.output import NonBlockingStream, nonblocking

PIPE_BYTES = 1 << 16


@pytest.fixture
def pipe() -> Iterator[tuple[int, TextIO]]:
    """The end that is read, and the other one as a text file."""
    ours, theirs = os.pipe()
    with os.fdopen(theirs, "w") as file:
        yield ours, file
    os.close(ours)


def read(descriptor: int, last: str) -> str:
    """Everything until ``last`` has come."""
    text = ""
    while not text.endswith(last):
        part = os.read(descriptor, 1 << 16)
        assert part, f"the pipe ended without {last!r}"
        text += part.decode()
    return text


def test_what_is_written_arrives(pipe: tuple[int, TextIO]) -> None:
    ours, file = pipe
    stream = NonBlockingStream(file)
    for number in range(3):
        stream.write(f"{number} é\n")
    assert read(ours, "2 é\n") == "0 é\n1 é\n2 é\n"
    assert stream.finish()


def test_no_writer_waits_for_a_reader_that_does_not_come(pipe: tuple[int, TextIO]) -> None:
    _, file = pipe
    stream = NonBlockingStream(file, max_characters=PIPE_BYTES)
    for _ in range(100):
        stream.write("x" * PIPE_BYTES + "\n")
    assert stream.dropped > 90
    assert not stream.finish(0.01)


def test_a_late_reader_gets_the_number_of_missing_lines(pipe: tuple[int, TextIO]) -> None:
    ours, file = pipe
    stream = NonBlockingStream(file, max_characters=PIPE_BYTES)
    line = "x" * (PIPE_BYTES - 1) + "\n"
    stream.write(line * 2)
    for _ in range(7):
        stream.write("left out\n")
    assert read(ours, line * 2) == line * 2
    until = time.monotonic() + 10
    while stream.waiting and time.monotonic() < until:
        time.sleep(0)
    stream.write("here again\n")
    assert read(ours, "again\n") == "(7 lines dropped: the reader was behind)\nhere again\n"


def test_a_reader_that_is_gone_is_an_error_of_a_later_write(pipe: tuple[int, TextIO]) -> None:
    ours, file = pipe
    stream = NonBlockingStream(file)
    os.close(ours)
    stream.write("one\n")
    with pytest.raises(BrokenPipeError):
        stream.finish(5)
    os.dup2(os.open(os.devnull, os.O_RDONLY), ours)  # for the fixture


def test_a_file_without_a_descriptor_is_written_at_once() -> None:
    file = io.StringIO()
    assert nonblocking(file) is file


def test_a_descriptor_that_does_not_block_is_waited_for(pipe: tuple[int, TextIO]) -> None:
    ours, file = pipe
    os.set_blocking(file.fileno(), False)
    stream = NonBlockingStream(file, max_characters=4 * PIPE_BYTES)
    text = "x" * (4 * PIPE_BYTES - 1) + "\n"
    stream.write(text)
    assert read(ours, "\n") == text


RUN = """
import asyncio, json, sys, time
from pathlib import Path
import uvloop
from async_opd.observability.live.console import open_console
from async_opd.observability.run_log import RunLog
from tests.observability.test_run_log import config

async def lags(run_dir):
    chosen = config(console=sys.argv[2])
    with RunLog(chosen, run_dir, viewers=[open_console(chosen)]) as log:
        late = []
        for step in range(1, 201):
            log.log(step, {"loss/total": 1.0})
            log.message("x" * 20_000)
            due = time.monotonic() + 0.001
            await asyncio.sleep(0.001)
            late.append(time.monotonic() - due)
        (run_dir / "late.json").write_text(json.dumps(sorted(late)))
        log.finish("completed")

uvloop.run(lags(Path(sys.argv[1])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("console", ["plain", "live"])
def test_a_run_whose_output_nobody_reads_goes_on_and_ends(tmp_path: Path, console: str) -> None:
    ours, theirs = os.pipe()
    try:
        command = [sys.executable, "-c", RUN, str(tmp_path), console]
        done = subprocess.run(command, stdout=theirs, stderr=theirs, timeout=60, check=False)
    finally:
        os.close(ours)
        os.close(theirs)
    assert done.returncode == 0
    late = json.loads((tmp_path / "late.json").read_text())
    assert late[-1] < 10
    assert late[-5] < 1, "a machine stands still once or twice, a write that waits each time"
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "completed"
    assert ("the reader was behind" in (tmp_path / "run.log").read_text()) == (console == "plain")
