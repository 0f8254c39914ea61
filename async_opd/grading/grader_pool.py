"""Graders in separate processes: one that hangs or dies costs one response, and no run.

A process grades many responses (``processes/user_process.py``). One that is late, or dies, is
killed, and another one grades the next response.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, Self

import msgspec

from async_opd.config.run_config import RunConfig
from async_opd.config.secrets import named_variables
from async_opd.config.sections.evaluation import GradingConfig
from async_opd.core.errors import StageError
from async_opd.core.row import Row
from async_opd.grading.graders import REMEDY, Grade, GradeError, evaluates, exact, has_verifier
from async_opd.processes.user_process import Program, UserProcess, user_environ
from async_opd.waiting.deadline import Bound

PROGRAM = "async_opd.grading.grader_process"
LINE_BYTES = 1 << 20


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
        return user_environ(self.limits.pass_env, self.hidden_env)


class Graders:
    """One grader, in as many processes as it has work for, up to ``grading.processes``.

    The wait for a free process is not part of a response's time. ``exact`` runs in this process: it
    is known code, and quick.
    """

    def __init__(self, spec: GraderSpec) -> None:
        self._spec = spec
        self._room = asyncio.Semaphore(spec.limits.processes)
        self._idle: list[UserProcess] = []

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
            process = self._one_idle() or await _started(self._spec)
            try:
                return await self._graded(process, response, row)
            finally:
                if process.alive:
                    self._idle.append(process)

    async def _graded(self, process: UserProcess, response: str, row: Row) -> Grade:
        """The grade. GradeError; without a valid answer in time the process is ended as well."""
        name, timeout_s = self._spec.name, self._spec.limits.timeout_s
        try:
            async with Bound(timeout_s):
                answer = await process.ask(response, row)
            value = None if answer.cause else msgspec.json.decode(answer.value, type=_Value)
        except TimeoutError as error:
            process.end()
            cause = f"{name} took longer than {timeout_s:g} s on row {row.uid}, and was ended"
            remedy = "make it quicker, or raise grading.timeout_s"
            raise GradeError("grader", cause, remedy) from error
        except ConnectionError as error:
            cause = f"{name} ended its process ({process.end()}) on row {row.uid}"
            raise GradeError("grader", cause) from error
        except ValueError as error:
            process.end()
            cause = f"{name} sent an invalid answer on row {row.uid}: {error}"
            remedy = "other code in its process wrote to its socket: find and remove it"
            raise GradeError("grader", cause, remedy) from error
        except BaseException:
            process.end()
            raise
        if value is None:
            raise GradeError("grader", answer.cause, answer.remedy)
        return Grade(value.grade, value.extracted)

    def _one_idle(self) -> UserProcess | None:
        """An idle process that still runs: the kernel may have killed it for want of memory."""
        while self._idle:
            process = self._idle.pop()
            if process.alive:
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
        (await _started(spec)).end()
    except StageError as error:
        return error.cause
    return ""


class _Value(msgspec.Struct):
    """A grade, and the answer that the grader read from the response."""

    grade: Annotated[float, msgspec.Meta(ge=0, le=1)]
    extracted: str | None = None


async def _started(spec: GraderSpec) -> UserProcess:
    """A process with the grader. StageError if it cannot be loaded."""
    program = Program(PROGRAM, spec.limits.memory_gb, LINE_BYTES, spec.environ())
    return await UserProcess.start("grader", spec.name, program, spec.start_s, spec.name)
