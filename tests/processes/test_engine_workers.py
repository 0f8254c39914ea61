"""Work that an engine's process will never finish ends with the process."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from async_opd.core.errors import ProcessDied
from async_opd.processes.engine_workers import ExitWatch


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Like multiprocessing's sentinel: readable when the other end is closed."""
    reading, writing = os.pipe()
    yield reading, writing
    os.close(reading)


async def test_all_work_ends_and_what_comes_later_too(pipe: tuple[int, int]) -> None:
    watch = ExitWatch("student/0", [pipe[0]])
    works = [asyncio.create_task(watch.within(asyncio.Event().wait())) for _ in range(3)]
    asyncio.get_running_loop().call_soon(os.close, pipe[1])
    ended = await asyncio.gather(*works, return_exceptions=True)
    assert all(isinstance(error, ProcessDied) for error in ended)
    with pytest.raises(ProcessDied, match="student/0: its engine's process has ended"):
        await asyncio.wait_for(watch.within(asyncio.Event().wait()), 5)


SAYS_AND_ENDS = """
import asyncio, os, subprocess, sys
from async_opd.processes.engine_workers import ExitWatch

async def main():
    ended, child_s = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", sys.argv[2]],
        pass_fds=(child_s,),
    )
    os.close(child_s)
    try:
        await ExitWatch("student/0", [ended]).within(asyncio.sleep(60))
    except Exception as error:
        os.write(int(sys.argv[1]), str(error).encode())

asyncio.run(main())
"""


def error_of(engine: str, tmp_path: Path) -> str:
    """The error of work into an engine that runs this code, all output of which is in a file."""
    told = tmp_path / "told"
    with told.open("wb") as answer, (tmp_path / "worker.err").open("wb") as log:
        command = [sys.executable, "-c", SAYS_AND_ENDS, str(answer.fileno()), engine]
        fds = (answer.fileno(),)
        subprocess.run(command, pass_fds=fds, stdout=log, stderr=log, timeout=60, check=True)
    return told.read_text()


@pytest.mark.parametrize(
    ("engine", "quoted"),
    [
        (
            "import sys; print('well'); sys.exit('MemoryError: none left')",
            "the last error in its output: MemoryError: none left",
        ),
        (
            "import os; [print('line', n, flush=True) for n in range(5)]; os.kill(os.getpid(), 9)",
            "has no error and ends with: line 2 / line 3 / line 4",
        ),
    ],
    ids=["its error", "killed"],
)
def test_the_error_quotes_the_engines_last_words(tmp_path: Path, engine: str, quoted: str) -> None:
    assert quoted in error_of(engine, tmp_path)


async def test_work_that_is_done_gives_its_result_or_its_error(pipe: tuple[int, int]) -> None:
    async def fails() -> None:
        raise ValueError("oh")

    watch = ExitWatch("student/0", [pipe[0]])
    assert await watch.within(asyncio.sleep(0, 7)) == 7
    with pytest.raises(ValueError, match="oh"):
        await watch.within(fails())
    os.close(pipe[1])


async def test_it_watches_the_processes_of_multiprocessing() -> None:
    process = multiprocessing.get_context("spawn").Process(target=int)
    process.start()
    with pytest.raises(ProcessDied):
        await asyncio.wait_for(
            ExitWatch("e", [process.sentinel]).within(asyncio.Event().wait()), 60
        )
    process.join(30)
