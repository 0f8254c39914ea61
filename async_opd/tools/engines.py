"""The engines of a tool: each call starts those of one model, asks them, and ends them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from async_opd.config.run_config import RunConfig
from async_opd.core.samples import Prompt
from async_opd.models.engine_args import Device
from async_opd.observability.stall import most_tokens
from async_opd.waiting.deadline import Deadline, endless, race
from async_opd.waiting.liveness import ProgressWatchdog

if TYPE_CHECKING:
    from rollouter.stage import RollouterStage

Result = TypeVar("Result")
Notify = Callable[[str], None]
STALL = "raise timeouts.stall_s, or ask fewer prompts"


@dataclass(frozen=True)
class ToolEngines:
    """Common to all starts of a tool; ``notify`` gets a line for each event of the student's."""

    device: Device
    eos_ids: tuple[int, ...]
    notify: Notify

    async def of_student(
        self,
        config: RunConfig,
        stage: str,
        ask: Callable[[RollouterStage], Awaitable[Result]],
        requests: int,
    ) -> Result:
        """The answer of ``eval.replicas`` of the student, which get so many requests.

        StageError, of this ``stage`` if the engines end before they have answered, or compute no
        token for ``timeouts.stall_s``.
        """
        from async_opd.cluster.launch import launch_evaluators

        given: dict[str, Any] = {"device": self.device, "eos_ids": self.eos_ids}
        async with launch_evaluators(config, notify=self.notify, **given) as engines:
            watchdog = ProgressWatchdog(stage, config.timeouts.stall_s, "timeouts.stall_s")
            most = most_tokens(config, requests)
            asked = watchdog.within("waited for answers", ask(engines), engines.progress, most)
            return await race(asked, endless(stage, engines.run(), "before it had answered"))

    async def of_teacher(
        self,
        config: RunConfig,
        name: str,
        prompts: Sequence[Prompt],
        ask: Callable[[Any], Awaitable[Result]],
    ) -> Result:
        """The answer of a teacher's replicas, about these prompts. StageError."""
        from async_opd.cluster.launch import launch_teacher

        given: dict[str, Any] = {"device": self.device, "eos_ids": self.eos_ids}
        async with launch_teacher(config, name, prompts=prompts, **given) as replicas:
            return await Deadline(f"teachers.{name}").within(
                config.timeouts.stall_s, "scoring", ask(replicas), STALL
            )
