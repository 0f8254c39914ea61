"""Graders in separate processes: one that hangs or dies costs one response, and no run.

    request, response, row ──pickle──► async_opd.grading.grader_process
    a number, or the reason why not ◄──JSON line that names the request──┘
    its standard output and error ──a pipe──► ours, escaped line by line (GraderOutput)
    a process that is late, or dies ──► kill -9, and another process for the next response

A thread could not be killed, and code that holds the interpreter's lock would stop its whole
replica. A process grades many responses, and ends with its parent. It imports from where the parent
does, from the working directory only if the parent does.
"""

from __future__ import annotations

import asyncio
import codecs
import os
import pickle
import re
import secrets
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Annotated, Self, TextIO

import msgspec

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import named_variables, without_secret_variables
from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.errors import StageError
from async_opd.core.printable import on_one_line
from async_opd.core.row import Row
from async_opd.grading.graders import REMEDY, Grade, GradeError, evaluates, exact, has_verifier
from async_opd.models.engine_args import ONLY_ENGINES_OFFLINE
from async_opd.processes.output import nonblocking
from async_opd.processes.own_settings import SAFE_PATH
from async_opd.waiting.deadline import Bound

PROGRAM = "async_opd.grading.grader_process"
INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|TEMP|TMP|XDG_\w+"
    r"|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|LD_PRELOAD|MALLOC_\w+|ASYNC_OPD_\w+"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|KMP|TORCH|TORCHINDUCTOR|TRITON)_\w+|TOKENIZERS_PARALLELISM"
    r"|(CUDA|NVIDIA|HIP|ROCR)_(VISIBLE_DEVICES|DEVICE_ORDER|PATH)|ROCM_PATH|[A-Z]+_HOME|NLTK_DATA"
    r"|\w+_NUM_THREADS|\w+_CACHE(_DIR)?|LOCPATH|LOCALE_ARCHIVE|LEAN_PATH|MPL(BACKEND|CONFIGDIR)"
    r"|HF_\w+|TRANSFORMERS_(OFFLINE|CACHE)"
    r"|((?i:https?|no|all)_(?i:proxy))|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
)
"""Names of the environment variables that a grader's process inherits, unless they hold a secret:
a program needs them to be found, to find its files and to keep to its share of the machine."""
LOADED = "loaded"
LINE_BYTES = 1 << 20
MAX_CHARACTERS = 2000
"""The longest line; the rest of a longer one is shown as further lines."""
READ_BYTES = 1 << 16
SHOWN_BYTES = 1 << 16
"""Bytes shown between two grades. Those that follow are read and dropped."""
PAUSE_S = 0.01
"""Seconds between two reads of dropped bytes: a process may write without end."""


class GraderOutput:
    """Reads the pipe whenever it has bytes; nothing waits for its writers, or for their end.

    ``writer`` is the process's end of the pipe: the caller closes it once the process has started.
    """

    def __init__(self, file: TextIO | None = None) -> None:
        self._file = file or _standard_error(sys.stderr)
        self._reader, self.writer = os.pipe()
        os.set_blocking(self._reader, False)
        self._decoder = codecs.getincrementaldecoder("utf-8")("backslashreplace")
        self._line = ""  # the line that has no end yet
        self._room = SHOWN_BYTES
        self._dropped = 0
        self._timer: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._reader, self._read)

    def renew(self) -> None:
        """Allows ``SHOWN_BYTES`` more: a grade begins."""
        if self._dropped:
            self._print(f"({self._dropped} bytes dropped)")
        self._room, self._dropped = SHOWN_BYTES, 0

    def close(self) -> None:
        """Reads what is in the pipe and closes it, though children may still hold the other end."""
        if self._reader < 0:
            return
        self._pause()
        self._take()
        self._show("\n" if self._line else "")
        self.renew()
        os.close(self._reader)
        self._reader = -1

    def _pause(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._reader)

    def _read(self) -> None:
        ended = self._take()
        if ended or self._room <= 0:
            self._pause()
        if not ended and self._room <= 0:
            resume = partial(self._loop.add_reader, self._reader, self._read)
            self._timer = self._loop.call_later(PAUSE_S, resume)

    def _take(self) -> bool:
        """Reads once; whether all processes have closed the other end."""
        try:
            data = os.read(self._reader, READ_BYTES)
        except BlockingIOError:
            return False
        shown = data[: self._room]
        self._room -= len(shown)
        self._dropped += len(data) - len(shown)
        self._show(self._decoder.decode(shown))
        return not data

    def _show(self, text: str) -> None:
        *lines, self._line = (self._line + text).split("\n")
        for line in lines:
            self._print_in_parts(line)
        if len(self._line) > MAX_CHARACTERS:
            whole = len(self._line) // MAX_CHARACTERS * MAX_CHARACTERS
            self._print_in_parts(self._line[:whole])
            self._line = self._line[whole:]

    def _print_in_parts(self, line: str) -> None:
        for start in range(0, max(len(line), 1), MAX_CHARACTERS):
            self._print(line[start : start + MAX_CHARACTERS])

    def _print(self, line: str) -> None:
        with suppress(OSError, ValueError):  # standard error is closed
            self._file.write(f"  grader: {on_one_line(line)}\n")


@cache
def _standard_error(file: TextIO) -> TextIO:
    """A stream that never blocks, one for all graders of this process."""
    return nonblocking(file)


@dataclass(frozen=True)
class GraderSpec:
    """A grader and its bounds. ``start_s`` bounds its loading; imports may take a while.

    ``hidden_env``: variables with secrets whose names do not say so.
    """

    name: str
    limits: GradingConfig
    start_s: float
    hidden_env: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig, name: str) -> Self:
        """The grader ``name`` with the bounds of a run's config."""
        hidden = tuple(named_variables(config.model_dump(mode="json", by_alias=True)))
        return cls(name, config.grading, config.timeouts.engine_start_s, hidden)

    def environ(self) -> dict[str, str]:
        """The environment of a grader's process, without secrets: its code is not trusted."""
        given = self.limits.pass_env
        known = {
            name: value
            for name, value in os.environ.items()
            if name in given or INHERITED.fullmatch(name)
        }
        if known.pop(ONLY_ENGINES_OFFLINE, ""):
            del known["HF_HUB_OFFLINE"]
        kept = without_secret_variables(known, self.hidden_env, given)
        return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class Graders:
    """One grader, in as many processes as it has work for, up to ``grading.processes``.

    The wait for a free process is not part of a response's time. ``exact`` runs in this process: it
    is known code, and quick.
    """

    def __init__(self, spec: GraderSpec) -> None:
        self._spec = spec
        self._room = asyncio.Semaphore(spec.limits.processes)
        self._idle: list[_Process] = []

    async def grade(self, response: str, row: Row) -> Grade:
        """The grade from 0 to 1. GradeError if none comes in time; StageError without a process."""
        if self._spec.name == "exact" and not has_verifier(row):
            return exact(response, row)
        if row.task is not None and evaluates(row.task.name) and not self._spec.limits.allow_eval:
            cause = (
                f"the verifier of {row.task.name} would run the response to row {row.uid} as code"
            )
            raise GradeError("grader", cause, REMEDY)
        async with self._room:
            process = self._one_idle() or await _Process.start(self._spec)
            try:
                return await process.grade(response, row, self._spec.limits.timeout_s)
            finally:
                if process.alive:
                    self._idle.append(process)

    def _one_idle(self) -> _Process | None:
        """An idle process that still runs: the kernel may have killed it for want of memory."""
        while self._idle:
            process = self._idle.pop()
            if process.process.poll() is None:
                return process
            process.end()
        return None

    def close(self) -> None:
        """Ends the idle processes."""
        while self._idle:
            self._idle.pop().end()


async def loading_fault(spec: GraderSpec) -> str:
    """Why a grader cannot be loaded in a process as a run starts it; '' if it can.

    Its module may do anything, and take ``start_s`` at most.
    """
    try:
        (await _Process.start(spec)).end()
    except StageError as error:
        return error.cause
    return ""


class _Answer(msgspec.Struct):
    """A grade with its extracted answer, or the cause of having none; ``to`` is the request."""

    to: str
    grade: Annotated[float, msgspec.Meta(ge=0, le=1)]
    cause: str
    remedy: str
    extracted: str | None = None

    @classmethod
    def read(cls, line: bytes, request: str) -> _Answer:
        """ValueError for a line that does not answer the request: grader code may have sent it."""
        try:
            answer = msgspec.json.decode(line, type=cls)
        except RecursionError as error:  # msgspec's own errors are ValueErrors
            raise ValueError(f"{type(error).__name__}: {error}") from error
        if answer.to != request:
            raise ValueError("the line names another request")
        return answer


@dataclass
class _Process:
    """A grader's process. It is ended when its answer is late, or the wait for it is cancelled."""

    name: str
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    output: GraderOutput
    alive: bool = True

    @classmethod
    async def start(cls, spec: GraderSpec) -> Self:
        """Returns when the grader is loaded. StageError if it cannot be loaded."""
        parent_end, child_end = socket.socketpair()
        output = GraderOutput()
        try:
            with child_end:
                popen = _popen(spec, child_end.fileno(), output.writer)
        except BaseException:
            parent_end.close()
            output.close()
            raise
        finally:
            os.close(output.writer)
        streams = await asyncio.open_connection(sock=parent_end, limit=LINE_BYTES)
        process = cls(spec.name, popen, *streams, output)
        cause = await process._loaded(spec.start_s)
        if cause:
            process.end()
            raise StageError("grader", f"{spec.name} cannot be loaded: {cause}", "see its module")
        return process

    async def _loaded(self, start_s: float) -> str:
        """'' when the grader is loaded, else the cause why it cannot be."""
        try:
            async with Bound(start_s):
                return (await self._answer(LOADED)).cause
        except TimeoutError:
            return f"it took longer than {start_s:g} s (timeouts.engine_start_s)"
        except ConnectionError:
            return f"its process ended ({self.end()})"
        except ValueError as error:
            return f"its process sent an invalid answer: {error}"
        except BaseException:
            self.end()
            raise

    async def grade(self, response: str, row: Row, timeout_s: float) -> Grade:
        """The grade. GradeError; without a valid answer in time the process is ended as well."""
        request = secrets.token_hex(8)
        self.output.renew()
        try:
            async with Bound(timeout_s):
                self.writer.write(pickle.dumps((request, response, row)))
                await self.writer.drain()
                answer = await self._answer(request)
        except TimeoutError as error:
            self.end()
            cause = f"{self.name} took longer than {timeout_s:g} s on row {row.uid}, and was ended"
            remedy = "make it quicker, or raise grading.timeout_s"
            raise GradeError("grader", cause, remedy) from error
        except ConnectionError as error:
            cause = f"{self.name} ended its process ({self.end()}) on row {row.uid}"
            raise GradeError("grader", cause) from error
        except ValueError as error:
            self.end()
            cause = f"{self.name} sent an invalid answer on row {row.uid}: {error}"
            remedy = "other code in its process wrote to its socket: find and remove it"
            raise GradeError("grader", cause, remedy) from error
        except BaseException:
            self.end()
            raise
        if answer.cause:
            raise GradeError("grader", answer.cause, answer.remedy)
        return Grade(answer.grade, answer.extracted)

    async def _answer(self, request: str) -> _Answer:
        """ConnectionResetError if the process has ended, ValueError for an invalid answer."""
        line = await self.reader.readline()
        if not line.endswith(b"\n"):
            raise ConnectionResetError("the process has ended")
        return _Answer.read(line, request)

    def end(self) -> str:
        """Kills the process and its children with -9. Returns how the process has ended."""
        self.alive = False
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        self.writer.close()
        self.output.close()
        code = self.process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _popen(spec: GraderSpec, connection: int, output: int) -> subprocess.Popen[bytes]:
    """Starts the process. The event loop's thread has to call it: the process ends with its thread.

    The working directory is not on its path (``-P``). ``PYTHONSAFEPATH`` is unset, because a script
    that a grader starts may import what lies beside it.
    """
    env = spec.environ()
    env.pop(SAFE_PATH, None)
    memory = str(round(spec.limits.memory_gb * 1e9))
    return subprocess.Popen(
        [sys.executable, "-P", "-m", PROGRAM, str(connection), spec.name, memory],
        pass_fds=[connection],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,  # Ctrl-C is for the run
    )
