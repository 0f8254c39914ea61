"""Starts the models of a probe one after the other, and asks them.

    student's rollout engines ──► answers, responses
    student's weights in a scoring engine ──► its top-k after the student's prompt: the floor
    each teacher's engines ──► its top-k of the responses, its own answers
    one of low precision, with the weights of its files ──► its top-k: the bias of its precision

Never are two of them there at once: a probe needs the memory of the largest. Nothing is kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from async_opd.checks.endpoint_probes import endpoint_probes
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import ForwardKLConfig, scored_top_k
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.core.batch import Batch
from async_opd.core.errors import ConfigError
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.stages import SamplingSpec
from async_opd.files.safe_open import private_files
from async_opd.models.model_files import ModelFiles
from async_opd.models.tokenizer import Text
from async_opd.prepare import check_inputs
from async_opd.tools.doctor.distances import unknown_bias
from async_opd.tools.engines import (
    ITSELF,
    Notify,
    ToolEngines,
    with_itself_as_teacher,
    with_one_teacher,
    with_whole_teacher,
)
from async_opd.tools.evaluated_model import evaluation_config
from async_opd.tools.probe.asked import AskedSource, asked_sources
from async_opd.tools.probe.figures import Measured
from async_opd.tools.probe.measuring import (
    Answerer,
    Model,
    StudentAnswers,
    ask_student,
    ask_teacher,
    scored,
    with_whole,
)
from async_opd.waiting.deadline import gather_or_cancel
from teachers.endpoint.check import check_endpoints

TOP_K, SERVED_TOP_K = 64, 20
"""Tokens at each position; where a teacher is a server, those of the loss, or what vLLM's sends."""


class Replicas:
    """The replicas of one teacher as one model."""

    def __init__(self, replicas: Sequence[Model]) -> None:
        self._replicas = replicas
        self._calls = 0

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """Each replica answers an equal share."""
        size = -(-len(prompts) // len(self._replicas))
        parts = [prompts[at * size : (at + 1) * size] for at in range(len(self._replicas))]
        answers = await gather_or_cancel(
            *(one.generate(own, sampling) for one, own in zip(self._replicas, parts, strict=True))
        )
        return [rollout for own in answers for rollout in own]

    async def score(self, batch: Batch) -> Batch:
        """The replicas score in turn."""
        self._calls += 1
        return await self._replicas[self._calls % len(self._replicas)].score(batch)


async def measure(
    config: RunConfig, sources: Sequence[AskedSource], engines: ToolEngines
) -> list[Measured]:
    """The figures of each source, in order. StageError."""
    notify = engines.notify
    notify("starting the student")
    answers = await _of_student(config, sources, engines)
    alone = _with_top_k(config)
    seen = {p.data_source for one in sources for p in one.asked.prompts if p.media}
    by_itself = with_itself_as_teacher(alone, seen)

    async def score_all(replicas: Sequence[Model]) -> list[list[Sample]]:
        model = Replicas(replicas)
        read = [[its.without_teacher_inputs for its in one.rollouts] for one in answers]
        return [await scored(model, rollouts) for rollouts in read]

    notify("starting a scoring engine with the student's weights")
    shown = [prompt for one in sources for prompt in one.asked.prompts]
    own = await engines.of_teacher(by_itself, ITSELF, shown, score_all)
    found: dict[str, Measured] = {}
    for name in dict.fromkeys(one.teacher for one in sources):

        async def ask(replicas: Sequence[Model], name: str = name) -> None:
            model = Replicas(replicas)
            for one, its, scores in zip(sources, answers, own, strict=True):
                if one.teacher == name:
                    names = (one.source, name)
                    found[one.source] = await ask_teacher(model, one.asked, its, scores, names)

        notify(f"starting teacher {name}")
        shown = [prompt for one in sources if one.teacher == name for prompt in one.asked.prompts]
        await engines.of_teacher(with_one_teacher(alone, name), name, shown, ask)

        async def ask_whole(replicas: Sequence[Model], name: str = name) -> None:
            model = Replicas(replicas)
            for one, its in zip(sources, answers, strict=True):
                if one.teacher == name:
                    scores = await scored(model, its.rollouts)
                    found[one.source] = with_whole(found[one.source], scores)

        if (whole := with_whole_teacher(alone, name)) is not None:
            notify(f"starting teacher {name} with the weights of its files")
            try:
                await engines.of_teacher(whole, name, shown, ask_whole)
            except Exception as error:  # Ray raises the bare class if it cannot start
                notify(f"teachers.{name}: the bias of its precision was not measured: {error}")
    return [found[one.source] for one in sources]


async def _of_student(
    config: RunConfig, sources: Sequence[AskedSource], engines: ToolEngines
) -> list[StudentAnswers]:
    async def answers(stage: Answerer) -> list[StudentAnswers]:
        return [await ask_student(stage, one.asked) for one in sources]

    alone = evaluation_config(config, None, None)
    requests = sum(len(one.asked.prompts) * (one.asked.evaluated.n + 1) for one in sources)
    return await engines.of_student(alone, "student", answers, requests)


def _with_top_k(config: RunConfig) -> RunConfig:
    """The config whose teachers send their top-k, as many as the student has tokens at most."""
    files = ModelFiles.read(config.student.model, weights=False)
    rows = None if files is None else files.vocabulary
    served = any(isinstance(one, EndpointTeacher) for one in config.teachers.values())
    most = scored_top_k(config.loss) or SERVED_TOP_K if served else TOP_K
    loss = ForwardKLConfig(top_k=min(most, rows or most))
    return config.model_copy(update={"loss": loss})


def run_engines(config: RunConfig, where: str, count: int, notify: Notify) -> list[Measured]:
    """Downloads what the config names on the hub, and measures. ConfigError before an engine.

    ``count``: prompts of each source. ``notify`` gets a line when something is started.
    """
    import uvloop

    ready = check_inputs(config, where, fetch=True, load=True)
    config, inputs = ready.config, ready.inputs
    for note in inputs.notes:
        notify(note)
    problems = inputs.problems or check_endpoints(
        _with_top_k(config), where, endpoint_probes(config, inputs)
    )
    if problems:
        raise ConfigError(problems)
    config, text = ready.with_defaults().config, Text.of(config)
    place = None if config.cluster.joins is None else Path(config.run_dir or ".").parent
    with private_files(), ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix=".probe-", dir=place)))
        sources = asked_sources(config, inputs, text, count, folder)
        for one in sources:
            stack.callback(one.evaluation.close)
        if not sources:
            message = "no source has a teacher and a prompt that fits"
            raise ConfigError.of("data.train", message, "see async_opd doctor", where)
        for name in dict.fromkeys(one.teacher for one in sources):
            if unknown := unknown_bias(config, where, name):
                notify(str(unknown))
        quick = config.model_copy(update={"run_dir": str(folder)})
        engines = ToolEngines(ready.device, text.response_ends(), notify)
        return list(uvloop.run(measure(quick, sources, engines)))
