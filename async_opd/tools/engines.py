"""The engines of a tool: each call starts those of one model, asks them, and ends them.

Engines of a single teacher are started alone, to compare it or to ask it: its config is made here.
"""

from __future__ import annotations

from asyncio import to_thread
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from async_opd.config.run_config import RunConfig
from async_opd.config.sections.teachers import EndpointTeacher, SelfTeacher, VllmTeacher
from async_opd.core.samples import Prompt
from async_opd.models.engine_args import Device
from async_opd.observability.stall import most_tokens
from async_opd.waiting.deadline import Deadline, endless, race
from async_opd.waiting.liveness import ProgressWatchdog

if TYPE_CHECKING:
    from async_opd.core.samples import Rollout
    from async_opd.core.stages import SamplingSpec
    from async_opd.grading.evaluation import Evaluation, EvaluationResult
    from rollouter.stage import RollouterStage

ITSELF = "student"
"""The name of the teacher that is the student itself."""


def with_one_teacher(config: RunConfig, name: str) -> RunConfig:
    """The config with this teacher, on dedicated GPUs: no other pool is there."""
    teacher = config.teachers[name]
    own = {} if isinstance(teacher, EndpointTeacher) else {"placement": "dedicated", "with_": None}
    return config.model_copy(update={"teachers": {name: teacher.model_copy(update=own)}})


def with_whole_teacher(config: RunConfig, name: str) -> RunConfig | None:
    """``with_one_teacher`` in the precision of its files; None if the run has it in that already.

    None for other kinds than ``vllm``, too: servers have a precision that is not known, and the
    student itself teaches nothing at first.
    """
    alone = with_one_teacher(config, name)
    teacher = alone.teachers[name]
    if not isinstance(teacher, VllmTeacher) or not teacher.engine.low_precision:
        return None
    whole = teacher.model_copy(update={"engine": teacher.engine.whole, "replicas": 1})
    return alone.model_copy(update={"teachers": {name: whole}})


def with_itself_as_teacher(config: RunConfig, shown: Collection[str] = ()) -> RunConfig:
    """The config with the student as the only teacher, in a whole engine like its teachers'.

    That is the first teacher's that has engines, if possible one of the data sources ``shown``,
    whose prompts have images: another's may have no room for them.
    """
    vision = {config.teacher_of(source) for source in shown}
    engines = {
        name: one.engine
        for name, one in config.teachers.items()
        if not isinstance(one, EndpointTeacher)
    }
    first = sorted(engines, key=lambda name: name not in vision)[:1]
    settings = engines[first[0]] if first else config.rollout.engine
    itself = SelfTeacher(kind="self", sources=[ITSELF], engine=settings.whole)
    return config.model_copy(update={"teachers": {ITSELF: itself}})


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
        from async_opd.cluster.launch_parts import launch_evaluators

        given: dict[str, Any] = {"device": self.device, "eos_ids": self.eos_ids}
        async with launch_evaluators(config, notify=self.notify, **given) as engines:
            watchdog = ProgressWatchdog(stage, config.timeouts.stall_s, "timeouts.stall_s")
            most = most_tokens(config, requests)
            asked = watchdog.within("waited for answers", ask(engines), engines.progress, most)
            return await race(asked, endless(stage, engines.run(), "before it had answered"))

    async def evaluated(
        self, config: RunConfig, evaluation: Evaluation, answers_file: str, as_teacher: bool
    ) -> EvaluationResult:
        """The evaluation of the student, which is recorded and closed here. StageError.

        ``as_teacher``: it reads teachers' prompts.
        """

        async def asked(stage: RollouterStage) -> EvaluationResult:
            async def answers(prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
                seen = [prompt.for_teacher for prompt in prompts] if as_teacher else prompts
                return await stage.generate(seen, sampling)

            return await evaluation.run(answers, "eval")

        try:
            found = await self.of_student(config, "evaluation", asked, evaluation.requests)
            await to_thread(evaluation.record, answers_file, found)
        finally:  # in the loop in which graders' processes were started
            evaluation.close()
        return found

    async def of_teacher(
        self,
        config: RunConfig,
        name: str,
        prompts: Sequence[Prompt],
        ask: Callable[[Any], Awaitable[Result]],
    ) -> Result:
        """The answer of a teacher's replicas, about these prompts. StageError."""
        from async_opd.cluster.launch_parts import launch_teacher

        given: dict[str, Any] = {"device": self.device, "eos_ids": self.eos_ids}
        async with launch_teacher(config, name, prompts=prompts, **given) as replicas:
            return await Deadline(f"teachers.{name}").within(
                config.timeouts.stall_s, "scoring", ask(replicas), STALL
            )
