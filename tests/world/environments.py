"""Environments that hang, die, take memory and raise, for processes of their pool."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import Any, cast

import msgspec

from async_opd.config.sections.environment import EnvironmentConfig
from async_opd.core.environments import AssistantMessage, ToolCall
from async_opd.core.row import Row
from async_opd.environments.pool import EnvironmentSpec
from async_opd.processes.user_process import Answer, UserProcess
from tests.world.clock import settle

WORLD = "tests.world.environments"
ANOTHER = Event()


def spec_of(kind: str = "class", start_s: float = 60, **section: Any) -> EnvironmentSpec:
    """Of the class ``Counter``, unless the section says otherwise."""
    if kind == "class":
        section = {"factory": f"{WORLD}:Counter", **section}
    return EnvironmentSpec(EnvironmentConfig.model_validate({"kind": kind, **section}), start_s)


def row(uid: str = "0:7", **fields: Any) -> Row:
    return Row(uid, "a", "p", None, fields)


def calls(*named: tuple[str, dict[str, Any]], malformed: tuple[str, ...] = ()) -> AssistantMessage:
    return AssistantMessage("", calls=tuple(ToolCall(*one) for one in named), malformed=malformed)


def call(name: str, **arguments: Any) -> AssistantMessage:
    return calls((name, arguments))


class Counter:
    """Adds numbers. Its ``reset`` does what the row's field ``then`` says."""

    def __init__(self, start: int = 0, tell: str = "") -> None:
        self.total, self._tell = start, tell
        self._random = random.Random(0)

    def reset(self, then: str = "", seed: int = 0, **row: Any) -> str | None:
        self._random.seed(seed)
        if then:
            _then(then)
        return row.get("opening")

    def add(self, number: int) -> int:
        """Adds to the total.

        Args:
            number: The number to add.
        """
        self.total += number
        return self.total

    def drawn(self) -> int:
        """A random number."""
        return self._random.randrange(10**9)

    def do(self, what: str) -> str:
        """Does something.

        Args:
            what: One of the names below.
        """
        _then(what)
        return "done"

    async def later(self, text: str = "later") -> list[str]:
        """Comes later.

        Args:
            text: What comes.
        """
        await asyncio.sleep(0)
        if text == "cancelled":
            raise asyncio.CancelledError
        return [text]

    def large(self, lines: int) -> str:
        """Has many lines.

        Args:
            lines: Their number.
        """
        return "a line\udc80\n" * lines

    def variable(self, name: str) -> str:
        """An environment variable.

        Args:
            name: Its name.
        """
        return os.environ.get(name, "not set")

    def pid(self) -> int:
        """The number of the process."""
        return os.getpid()

    def get_reward(self) -> float:
        return float(self.total)

    def close(self) -> None:
        if self._tell:
            with Path(self._tell).open("a") as file:
                file.write("closed\n")

    def _hidden(self) -> None: ...


class Announced(Counter):
    """Writes the number of its process when it begins."""

    def reset(self, then: str = "", seed: int = 0) -> None:  # type: ignore[override]
        with Path(self._tell).open("a") as file:
            file.write(f"{os.getpid()}\n")
        if then:
            _then(then)


class HangsAtClose(Counter):
    """Never closes."""

    def close(self) -> None:
        Event().wait()


class WithoutReset:
    """Is not an environment."""

    def act(self) -> str:
        """Acts."""
        return ""


class WithoutTools:
    """Is not an environment."""

    def reset(self, **row: Any) -> None: ...


class WithoutHints(WithoutTools):
    """Has a tool that cannot be shown."""

    def act(self, number):  # type: ignore[no-untyped-def]
        """Acts.

        Args:
            number: A number.
        """


class WithoutDocstring(WithoutTools):
    """Has a tool that cannot be shown."""

    def act(self, number: int) -> None: ...


class NeedsField(WithoutReset):
    """Takes one field of the row."""

    def reset(self, board: str) -> list[str] | str:
        return [board] if board == "list" else board


def made(start: int) -> Counter:
    """Makes an environment, as a factory that is not a class."""
    return Counter(start)


def multiply(a: int, b: int) -> int:
    """Multiplies.

    Args:
        a: One number.
        b: The other.
    """
    return a * b


def _then(what: str) -> None:
    """What a hostile environment does."""
    match what:
        case "hang":
            Event().wait()
        case "lock":
            re.match(r"(a+)+b", "a" * 60)  # for hours, and no other thread runs meanwhile
        case "exit":
            os._exit(3)
        case "leave":
            sys.exit("left")
        case "die":
            signal.raise_signal(signal.SIGSEGV)
        case "memory":
            bytearray(3 * 10**9)
        case "raise" | "half":
            raise ValueError(f"no such {'square' if what == 'raise' else chr(0xD800)}")
        case "interrupt":
            raise KeyboardInterrupt
        case "wait":
            time.sleep(1.0)
        case "wait for another":
            assert ANOTHER.wait(60)
            ANOTHER.clear()
        case "go on":
            ANOTHER.set()


class FakeHost:
    """A process of the pool without one, whose calls answer after a while, hang, or end it.

    ``began`` and ``ended`` are the names of its environments, once for each time.
    """

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.alive = chance, True
        self.began: list[str] = []
        self.ended: list[str] = []
        self.waiting: set[asyncio.Future[Answer]] = set()

    async def ask(self, name: str, method: str, *given: Any) -> Answer:
        if not self.alive:
            raise ConnectionResetError("the process has ended")
        if name and name not in self.began:
            self.began.append(name)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.waiting.add(future)
        asyncio.get_running_loop().create_task(self._answer(future, name, method))
        return await future

    async def _answer(self, future: asyncio.Future[Answer], name: str, method: str) -> None:
        await settle(self.chance.randint(0, 12))
        play = self.chance.random() if name else 1.0
        if play < 0.03:
            self.end()
        if not self.alive:
            self._fail(future)
        elif play > 0.06:
            if method == "close":
                self.ended.append(name)
            self.waiting.discard(future)
            value = {"reset": b"{}", "step": b"{}", "reward": b"1.0"}.get(method, b"null")
            if not future.done():
                future.set_result(Answer("", msgspec.Raw(value)))

    def _fail(self, future: asyncio.Future[Answer]) -> None:
        if not future.done():
            future.set_exception(ConnectionResetError("the process has ended"))

    def end(self) -> str:
        if self.alive:
            self.alive = False
            self.ended += [name for name in self.began if name not in self.ended]
        for future in self.waiting:
            self._fail(future)
        self.waiting.clear()
        return "signal 9"


@dataclass(frozen=True)
class FakeSpec(EnvironmentSpec):
    """Its processes are FakeHosts; ``hosts`` are all of them."""

    chance: random.Random = field(default_factory=random.Random)
    hosts: list[FakeHost] = field(default_factory=list)

    async def started(self) -> UserProcess:
        await settle(self.chance.randint(0, 5))
        self.hosts.append(FakeHost(self.chance))
        return cast(UserProcess, self.hosts[-1])
