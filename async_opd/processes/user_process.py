"""A process that runs a user's code for this one, and can be killed.

    request ──pickle──► async_opd.processes.in_user_process, in the program that is started
    a value, or the cause of having none ◄──JSON lines that name the request, in any order──┘
    its standard output and error ──a pipe──► ours, escaped line by line (UserOutput)

A thread could not be killed, and code that holds the interpreter's lock would stop its whole
replica. The process ends with its parent. It imports from where the parent does, from the working
directory only if the parent does.
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
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from functools import cache, partial
from typing import Any, NamedTuple, Self, TextIO

import msgspec

from async_opd.config.secrets import without_secret_variables
from async_opd.config.user_code import ONLY_ENGINES_OFFLINE
from async_opd.core.errors import StageError
from async_opd.core.printable import on_one_line
from async_opd.processes.output import nonblocking
from async_opd.processes.own_settings import SAFE_PATH
from async_opd.waiting.deadline import Bound

INHERITED = re.compile(
    r"PATH|HOME|USER|LOGNAME|SHELL|PWD|LANG|LANGUAGE|LC_\w+|TZ|TERM|TMPDIR|TEMP|TMP|XDG_\w+"
    r"|PYTHON\w+|VIRTUAL_ENV|CONDA_PREFIX|LD_LIBRARY_PATH|LD_PRELOAD|MALLOC_\w+|ASYNC_OPD_\w+"
    r"|(OMP|MKL|OPENBLAS|NUMEXPR|KMP|TORCH|TORCHINDUCTOR|TRITON)_\w+|TOKENIZERS_PARALLELISM"
    r"|(CUDA|NVIDIA|HIP|ROCR)_(VISIBLE_DEVICES|DEVICE_ORDER|PATH)|ROCM_PATH|[A-Z]+_HOME|NLTK_DATA"
    r"|\w+_NUM_THREADS|\w+_CACHE(_DIR)?|LOCPATH|LOCALE_ARCHIVE|LEAN_PATH|MPL(BACKEND|CONFIGDIR)"
    r"|HF_\w+|TRANSFORMERS_(OFFLINE|CACHE)"
    r"|((?i:https?|no|all)_(?i:proxy))|SSL_CERT_(FILE|DIR)|(REQUESTS|CURL)_CA_BUNDLE"
)
"""Names of the environment variables that such a process inherits, unless they hold a secret: a
program needs them to be found, to find its files and to keep to its share of the machine."""
MAX_CHARACTERS = 2000
"""The longest line of output; the rest of a longer one is shown as further lines."""
READ_BYTES = 1 << 16
SHOWN_BYTES = 1 << 16
"""Bytes shown between two requests. Those that follow are read and dropped."""
PAUSE_S = 0.01
"""Seconds between two reads of dropped bytes: a process may write without end."""


def user_environ(given: Collection[str], hidden: Iterable[str]) -> dict[str, str]:
    """The environment variables of a user's code, which is not trusted: no secrets but ``given``.

    ``hidden``: variables with secrets whose names do not say so.
    """
    known = {
        name: value
        for name, value in os.environ.items()
        if name in given or INHERITED.fullmatch(name)
    }
    if known.pop(ONLY_ENGINES_OFFLINE, ""):
        del known["HF_HUB_OFFLINE"]
    kept = without_secret_variables(known, hidden, given)
    return {**kept, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


class UserOutput:
    """Reads the pipe whenever it has bytes; nothing waits for its writers, or for their end.

    ``label`` begins each line; ``writer`` is the process's end of the pipe: the caller closes it
    once the process has started.
    """

    def __init__(self, label: str, file: TextIO | None = None) -> None:
        self._label = label
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
        """Allows ``SHOWN_BYTES`` more: a request begins."""
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
            self._file.write(f"  {self._label}: {on_one_line(line)}\n")


@cache
def _standard_error(file: TextIO) -> TextIO:
    """A stream that never blocks, one for all such processes of this one."""
    return nonblocking(file)


class Answer(msgspec.Struct):
    """A value as JSON, or the cause of having none; ``to`` is the request."""

    to: str
    value: msgspec.Raw
    cause: str = ""
    remedy: str = ""


class Program(NamedTuple):
    """The program of a process: a module that calls ``serve``, within its bounds.

    ``memory_gb`` is 1e9 bytes of data, ``line_bytes`` the length of the longest answer.
    """

    module: str
    memory_gb: float
    line_bytes: int
    environ: Mapping[str, str]


class UserProcess:
    """A process, and the requests that it has not answered yet.

    ``stage`` names it in output and errors. The caller bounds the wait for an answer.
    """

    def __init__(self, stage: str) -> None:
        self.output = UserOutput(stage)
        self._asked: dict[str, asyncio.Future[Answer]] = {}
        self._broken: Exception | None = None
        self.process: subprocess.Popen[bytes]
        self._writer: asyncio.StreamWriter
        self._listening: asyncio.Task[None]

    @classmethod
    async def start(
        cls, stage: str, name: str, program: Program, start_s: float, *load: Any
    ) -> Self:
        """Returns when ``name`` is loaded as ``load`` says. StageError if it cannot be loaded."""
        process = cls(stage)
        await process._connect(program)
        cause, remedy = await process._loaded(start_s, *load)
        if cause:
            process.end()
            raise StageError(stage, f"{name} cannot be loaded: {cause}", remedy or "see its module")
        return process

    async def _connect(self, program: Program) -> None:
        ours = self._spawn(program)
        try:
            reader, self._writer = await asyncio.open_connection(
                sock=ours, limit=program.line_bytes
            )
        except BaseException:
            self.process.kill()
            ours.close()
            self.output.close()
            raise
        self._listening = asyncio.create_task(self._listen(reader))

    def _spawn(self, program: Program) -> socket.socket:
        """Starts the process. The event loop's thread has to call it: it ends with its thread.

        The working directory is not on its path (``-P``). ``PYTHONSAFEPATH`` is unset, because a
        script that a user's code starts may import what lies beside it.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                handle, nbytes = theirs.fileno(), round(program.memory_gb * 1e9)
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-m", program.module, str(handle), str(nbytes)],
                    pass_fds=[handle],
                    env={k: v for k, v in program.environ.items() if k != SAFE_PATH},
                    stdin=subprocess.DEVNULL,
                    stdout=self.output.writer,
                    stderr=self.output.writer,
                    start_new_session=True,  # Ctrl-C is for the run
                )
        except BaseException:
            ours.close()
            self.output.close()
            raise
        finally:
            os.close(self.output.writer)
        return ours

    async def _loaded(self, start_s: float, *load: Any) -> tuple[str, str]:
        """Nothing when the code is loaded, else the cause why it cannot be, and a remedy."""
        try:
            async with Bound(start_s):
                answer = await self.ask(*load)
                return answer.cause, answer.remedy
        except TimeoutError:
            return f"it took longer than {start_s:g} s (timeouts.engine_start_s)", ""
        except ConnectionError:
            return f"its process ended ({self.end()})", ""
        except ValueError as error:
            return f"its process sent an invalid answer: {error}", ""
        except BaseException:
            self.end()
            raise

    @property
    def alive(self) -> bool:
        """Whether it can be asked; the kernel may have killed it for want of memory."""
        return self._broken is None and self.process.poll() is None

    async def ask(self, *request: Any) -> Answer:
        """The answer. ConnectionError once the process has ended, ValueError for an invalid line.

        An answer that comes after the wait was cancelled is dropped.
        """
        if self._broken is not None:
            raise self._broken
        self.output.renew()
        name = secrets.token_hex(8)
        message = pickle.dumps((name, *request))
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked[name] = answer
        try:
            self._writer.write(message)
            await self._writer.drain()
            return await answer
        finally:
            answer.cancel()

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        broken: Exception = ConnectionResetError("the process has ended")
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                answer = msgspec.json.decode(line, type=Answer)
                asked = self._asked.pop(answer.to, None)
                if asked is None:
                    raise ValueError("the line names another request")
                if not asked.done():
                    asked.set_result(answer)
        except RecursionError as error:  # msgspec's own errors are ValueErrors
            broken = ValueError(f"{type(error).__name__}: {error}")
        except (ValueError, ConnectionError) as error:
            broken = error
        self._break(broken)

    def _break(self, error: Exception) -> None:
        self._broken = self._broken or error
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(error)
        self._asked.clear()

    def end(self) -> str:
        """Kills the process and its children with -9. Returns how the process has ended."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(1)
        self._break(ConnectionResetError("the process was ended"))
        self._listening.cancel()
        self._writer.close()
        self.output.close()
        code = self.process.returncode
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"
