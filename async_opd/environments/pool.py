"""Environments in separate processes: one that hangs or dies costs its episode, and no run.

    open ──► room for one more ──► the process with the fewest ──► reset, step …, reward ──► close
                                         │
      a call is late, or the process dies: kill -9, and another process for the next episode
            that episode: RolloutFault     its neighbours in the process: Collateral

An environment stays in one process, which has a thread for it.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Self, TypeVar

import msgspec

from async_opd.config.secrets import named_variables
from async_opd.config.sections.environment import ENVIRONMENT, EnvironmentConfig
from async_opd.core.environments import AssistantMessage, Collateral, Opening, Outcome
from async_opd.core.errors import RolloutFault, StageError
from async_opd.core.row import Row
from async_opd.processes.user_process import Program, UserProcess, user_environ
from async_opd.waiting.deadline import Bound, Timer

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig

PROGRAM = "async_opd.environments.environment_process"
LINE_BYTES = 1 << 24
"""Above the longest answer: six bytes for each of its characters, and schemas of tools."""
MAX_CRASHES = 3
"""Unclear deaths of processes with episodes of the same row, until they are at fault."""
PING_S = 5.0
"""Seconds in which a process answers beside calls that are late, unless one holds its lock."""
CLOSED = "its pool was closed"
LATE_REMEDY = "make it quicker, or raise environment.timeouts.{}"
DEAD_REMEDY = "see its output above; environment.memory_gb bounds its memory"
Value = TypeVar("Value")


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environments of a run and their bounds. ``start_s`` bounds the loading of their code.

    ``hidden_env``: variables with secrets whose names do not say so.
    """

    config: EnvironmentConfig
    start_s: float
    hidden_env: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: RunConfig) -> Self:
        """The section ``environment`` of a run, which has one."""
        assert config.environment is not None
        hidden = tuple(named_variables(config.model_dump(mode="json", by_alias=True)))
        return cls(config.environment, config.timeouts.engine_start_s, hidden)

    @property
    def name(self) -> str:
        """The name of their code, for messages."""
        config = self.config
        return config.factory or config.id or ", ".join(config.tools)

    async def started(self) -> UserProcess:
        """A process with the code. StageError if it cannot be loaded."""
        config = self.config
        environ = user_environ(config.pass_env, self.hidden_env)
        program = Program(PROGRAM, config.memory_gb, LINE_BYTES, environ)
        return await UserProcess.start(ENVIRONMENT, self.name, program, self.start_s, config)


class Environments:
    """Up to ``concurrency`` environments at a time, in as many processes as are needed.

    ``episodes`` counts those that were opened, ``collateral`` those that have to begin again.
    ``notify`` gets each kind of warning once. ``timer`` and ``clock`` replace time.
    """

    def __init__(
        self,
        spec: EnvironmentSpec,
        notify: Callable[[str], None] = lambda text: None,
        timer: Timer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.spec, self.timer, self.clock = spec, timer, clock
        self.episodes = self.collateral = 0
        self.crashes: Counter[str] = Counter()  # by row, since one of its episodes ended well
        self._room = asyncio.Semaphore(spec.config.concurrency)
        self._hosts: list[_Host] = []
        self._notify = notify
        self._noted: set[str] = set()
        self._closed = False

    async def open(self) -> PooledEnvironment:
        """An environment for one episode, whose ``close`` makes room for another.

        Waits for room. StageError if a process cannot load it (twice, if another one did), or once
        this is closed.
        """
        await self._room.acquire()
        try:
            try:
                episode = await self._opened()
            except StageError:
                if not self.episodes or self._closed:
                    raise
                episode = await self._opened()  # the code was loaded before: the machine was slow
        except BaseException:
            self._room.release()
            raise
        self.episodes += 1
        return episode

    async def _opened(self) -> PooledEnvironment:
        if self._closed:
            raise StageError(ENVIRONMENT, CLOSED)
        host = self._host()
        episode = PooledEnvironment(self, host)
        host.episodes.add(episode)
        try:
            await asyncio.wait({host.process})
            if host.process.cancelled():
                raise StageError(ENVIRONMENT, CLOSED)
            host.process.result()
        except BaseException:
            host.episodes.discard(episode)
            raise
        return episode

    def _host(self) -> _Host:
        """The process with the fewest environments; another one if all are in use."""
        self._hosts = [host for host in self._hosts if not host.gone]
        fewest = min(self._hosts, key=lambda host: len(host.episodes), default=None)
        all_in_use = fewest is None or bool(fewest.episodes)
        if fewest is None or (all_in_use and len(self._hosts) < self.spec.config.processes):
            fewest = _Host(self.spec, self.crashes)
            self._hosts.append(fewest)
        return fewest

    def leave(self, episode: PooledEnvironment, host: _Host) -> None:
        """An episode is over: there is room for another."""
        host.episodes.discard(episode)
        host.at_work.discard(episode)
        self._room.release()

    def lose(self) -> None:
        """Counts an episode that begins again because of another one."""
        self.collateral += 1

    def note(self, kind: str, text: str) -> None:
        """Warns once of each kind."""
        if kind not in self._noted:
            self._noted.add(kind)
            self._notify(text)

    def close(self) -> None:
        """Ends all processes, whatever runs in them. Their episodes have StageErrors."""
        self._closed = True
        for host in self._hosts:
            host.end(CLOSED)


class _Host:
    """A process and its episodes. ``at_work``: those that it has a call of."""

    def __init__(self, spec: EnvironmentSpec, crashes: Counter[str]) -> None:
        self._crashes = crashes
        self.process = asyncio.create_task(spec.started())
        self.process.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.episodes: set[PooledEnvironment] = set()
        self.at_work: set[PooledEnvironment] = set()
        self.at_fault: Collection[PooledEnvironment] = ()
        self.how = self.closed = ""

    @property
    def gone(self) -> bool:
        """Whether it takes no more episodes; its own death is noticed here, too."""
        if not self.how and self.process.done():
            if self.process.cancelled() or self.process.exception() is not None:
                self.how = "it did not start"
            elif not self.process.result().alive:
                self.end_unclear()
        return bool(self.how)

    def end(self, closed: str = "", at_fault: Collection[PooledEnvironment] = ()) -> None:
        """Kills the process. Its other episodes find it at their present or next call."""
        if self.how:
            return
        self.how, self.closed, self.at_fault = "it was starting", closed, at_fault
        started = not self.process.cancel() and not self.process.cancelled()
        if started and self.process.exception() is None:
            self.how = self.process.result().end()

    async def end_late(self, late: PooledEnvironment, timer: Timer | None) -> None:
        """After a call was late: it is at fault, unless no call of the process can go on."""
        try:
            async with Bound(PING_S, timer):
                await self.process.result().ask("", "")
            self.end(at_fault=[late])
        except (TimeoutError, ConnectionError, ValueError):
            self.end_unclear()

    def end_unclear(self) -> None:
        """After the process died by itself, or hung as a whole: the only one at work is at fault.

        Of several, or if none was at work, it is not known which: those of a row are at fault once
        that happened ``MAX_CRASHES`` times to the row, and none of its episodes ended well between.
        """
        if self.how:
            return
        at_fault = list(self.at_work)
        if len(at_fault) != 1:
            suspects = at_fault or [one for one in self.episodes if one.of]
            self._crashes.update({one.of for one in suspects})
            at_fault = [one for one in suspects if self._crashes[one.of] >= MAX_CRASHES]
        self.end(at_fault=at_fault)


class PooledEnvironment:
    """``core.environments.Environment`` in a process of the pool. ``of``: its row, once begun."""

    def __init__(self, pool: Environments, host: _Host) -> None:
        self._pool, self._host = pool, host
        self._name = secrets.token_hex(8)
        self.of = ""
        self._ends = self._busy_until = 0.0
        self._collateral = False
        self._closing: asyncio.Task[None] | None = None

    async def reset(self, row: Row, seed: int) -> Opening:
        """Begins the episode, whose time runs from here."""
        times = self._pool.spec.config.timeouts
        self.of = f"row {row.uid}"
        self._ends = self._pool.clock() + times.episode_s
        return await self._in_episode("reset", times.reset_s, Opening, row, seed)

    async def step(self, message: AssistantMessage) -> Outcome:
        """The answer to a turn."""
        step_s = self._pool.spec.config.timeouts.step_s
        return await self._in_episode("step", step_s, Outcome, message)

    async def reward(self) -> float | None:
        """Bounded as a step; an episode whose time is over has its reward."""
        step_s = self._pool.spec.config.timeouts.step_s
        reward: float | None = await self._ask("reward", step_s, "step_s", float | None)
        self._pool.crashes.pop(self.of, None)
        return reward

    async def close(self) -> None:
        """Ends the episode, in the background if the wait is cancelled. Its faults are warnings.

        A call that was cancelled has the time that it had, and ``close_s`` more.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        pool = self._pool
        left = max(self._busy_until - pool.clock(), 0)
        try:
            if self.of and not self._host.gone:
                bound = pool.spec.config.timeouts.close_s + left
                await self._ask("close", bound, "close_s", None)
        except Collateral:  # it is closed with its process
            pass
        except StageError as error:
            if not self._host.closed:
                pool.note("close", f"an environment could not be closed: {error}")
        finally:
            pool.leave(self, self._host)

    async def _in_episode(self, method: str, bound: float, kind: type[Value], *given: Any) -> Value:
        left = self._ends - self._pool.clock()
        if left <= 0:
            self._fault("the episode took longer than {:g} s", "episode_s")
        key = f"{method}_s" if bound <= left else "episode_s"
        value: Value = await self._ask(method, min(bound, left), key, kind, *given)
        return value

    async def _ask(self, method: str, bound: float, key: str, kind: Any, *given: Any) -> Any:
        """A call's value. RolloutFault, Collateral, or StageError once the pool is closed."""
        pool, host = self._pool, self._host
        if host.gone:
            self._lost()
        host.at_work.add(self)
        self._busy_until = pool.clock() + bound
        try:
            async with Bound(bound, pool.timer):
                answer = await host.process.result().ask(self._name, method, *given)
                value = None if answer.cause else msgspec.json.decode(answer.value, type=kind)
        except TimeoutError:
            await host.end_late(self, pool.timer)
            if self in host.at_fault:
                self._fault(f"{method} took longer than {{:g}} s, and its process was ended", key)
            self._lost()
        except (ConnectionError, ValueError):
            host.end_unclear()
            self._lost()
        host.at_work.discard(self)
        self._busy_until = 0.0
        if answer.cause:
            raise RolloutFault(
                ENVIRONMENT, f"{pool.spec.name} on {self.of}: {answer.cause}", answer.remedy
            )
        return value

    def _fault(self, cause: str, key: str) -> NoReturn:
        found = cause.format(getattr(self._pool.spec.config.timeouts, key))
        cause = f"{self._pool.spec.name} on {self.of}: {found} (environment.timeouts.{key})"
        raise RolloutFault(ENVIRONMENT, cause, LATE_REMEDY.format(key)) from None

    def _lost(self) -> NoReturn:
        """Raises what the end of the process is to this episode."""
        host = self._host
        if host.closed:
            raise StageError(ENVIRONMENT, host.closed) from None
        if self in host.at_fault:
            cause = f"{self._pool.spec.name} on {self.of}: its process died ({host.how})"
            raise RolloutFault(ENVIRONMENT, cause, DEAD_REMEDY) from None
        if not self._collateral and self._closing is None:
            self._collateral = True
            self._pool.lose()
        raise Collateral(f"the process of {self.of} was ended ({host.how})") from None


async def environment_fault(
    spec: EnvironmentSpec, row: Row | None, rewards: bool = False
) -> StageError | None:
    """Why no episode can begin: its code cannot be loaded, or ``reset`` fails with the row.

    ``rewards``: also if it has no reward at all, which a grader of the run is to be.
    The code may do anything, and takes the bounds of a run at most. None if an episode begins.
    """
    environments = Environments(spec)
    try:
        episode = await environments.open()
        if row is not None:
            await episode.reset(row, 0)
            if rewards and not await _has_reward(episode):
                remedy = "add get_reward, or name another eval.grader and reward.grader"
                return StageError(ENVIRONMENT, f"{spec.name} gives no reward", remedy)
        await episode.close()
    except StageError as error:
        return error
    finally:
        environments.close()
    return None


async def _has_reward(episode: PooledEnvironment) -> bool:
    """Whether there is a reward; one that fails before the first turn is there."""
    try:
        return await episode.reward() is not None
    except RolloutFault:
        return True
