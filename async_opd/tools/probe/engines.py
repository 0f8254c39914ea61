"""Starts the models of a probe one after the other, and asks them.

    student's rollout engines ──► answers, responses
    student's weights in a scoring engine ──► its top-k after the student's prompt: the floor
    each teacher's engines ──► its top-k of the responses, its own answers
    one of low precision, with the weights of its files ──► its top-k: the bias of its precision

Never are two of them there at once: a probe needs the memory of the largest. Nothing is kept.

It asks prompts of each source, as its student and its teacher read them:

rows of data.train (of data.eval, if only these can be graded) ──by seed──► prompts ──► Asked
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

from async_opd.checks.endpoint_probes import endpoint_probes
from async_opd.checks.preflight import Inputs
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.environment import ENVIRONMENT
from async_opd.config.sections.loss import ForwardKLConfig, scored_top_k
from async_opd.config.sections.teachers import EndpointTeacher
from async_opd.config.user_code import GRADERS, names_user_code
from async_opd.core.batch import Batch
from async_opd.core.errors import ConfigError, RolloutFault
from async_opd.core.row import Row
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.stages import SamplingSpec
from async_opd.data.prompts import to_prompt
from async_opd.data.teacher_prompts import Reader, teacher_readers
from async_opd.files.safe_open import private_files
from async_opd.grading.evaluation import Evaluation
from async_opd.grading.evaluation_set import evaluation_of
from async_opd.grading.graders import has_verifier
from async_opd.models.hub import named_models
from async_opd.models.model_files import ModelFiles
from async_opd.models.tokenizer import Text
from async_opd.prepare import check_inputs
from async_opd.tools.doctor.bias import unknown_bias
from async_opd.tools.doctor.prompts import sampled
from async_opd.tools.doctor.templates import has_unused_template
from async_opd.tools.engines import (
    ITSELF,
    Notify,
    ToolEngines,
    with_itself_as_teacher,
    with_one_teacher,
    with_whole_teacher,
)
from async_opd.tools.evaluate import evaluation_config
from async_opd.tools.probe.figures import Measured
from async_opd.tools.probe.measuring import (
    Answerer,
    Asked,
    Model,
    StudentAnswers,
    ask_student,
    ask_teacher,
    scored,
    with_whole,
)
from async_opd.waiting.deadline import gather_or_cancel
from teachers.endpoint.check import check_endpoints

RESPONSE_TOKENS = 1024
"""Most tokens of a sampled response: gaps are known well before."""
SPARE = 2
"""Rows that are looked at for each prompt: some prompts do not fit."""


@dataclass(frozen=True)
class AskedSource:
    """A data source, its teacher's name, and what both models are asked."""

    source: str
    teacher: str
    asked: Asked
    evaluation: Evaluation
    """Its ``close`` ends the grader's processes."""


def asked_sources(
    config: RunConfig, inputs: Inputs, text: Text, count: int, folder: Path
) -> list[AskedSource]:
    """At most ``count`` prompts of each source that has a teacher and a prompt that fits."""
    made, readers = list[AskedSource](), teacher_readers(config, text)
    every = config.eval.model_copy(update={"max_prompts": None})
    whole = config.model_copy(update={"eval": every})
    trained, evaluated = (_by_source(part) for part in (inputs.checked, inputs.eval))
    played = config.environment is not None  # episodes read no prompt that was rendered before
    others = {} if played else _other_readers(config, text)
    for source, rows in sorted(trained.items()):
        teacher = config.teacher_of(source)
        graded = _can_be_graded(config, rows)
        if not graded and _can_be_graded(config, evaluated.get(source, [])):
            rows, graded = evaluated[source], True
        some = sampled(config, [rows], SPARE * count)
        chosen = [row for row in some if _fits(config, inputs, text, readers, row)][:count]
        evaluation = evaluation_of(whole, [chosen], text, folder, readers)
        if teacher is None or evaluation is None:
            continue
        asked = Asked(
            evaluation.prompts,
            evaluation.sampling,
            SamplingSpec(min(config.rollout.max_tokens, RESPONSE_TOKENS), 1.0, 1.0, 1),
            evaluation.grade if graded else None,
            _rendered(evaluation.prompts, chosen, others.get(teacher)),
        )
        made.append(AskedSource(source, teacher, asked, evaluation))
    return made


def _by_source(parts: Sequence[Sequence[Row]]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in chain.from_iterable(parts):
        found.setdefault(row.data_source, []).append(row)
    return found


def _can_be_graded(config: RunConfig, rows: Sequence[Row]) -> bool:
    """Whether some row has an answer or a verifier; a user's code may need neither."""
    grader = config.eval.grader
    if rows and (grader == ENVIRONMENT or names_user_code(grader, GRADERS)):
        return True
    return any(row.answer is not None or has_verifier(row) for row in rows)


def _fits(
    config: RunConfig, inputs: Inputs, text: Text, readers: dict[str, Reader], row: Row
) -> bool:
    """Whether the prompt can be made, and is not longer than a run takes."""
    limit = inputs.max_prompt_tokens
    try:
        to_prompt(
            row,
            text.encode,
            config.teacher_of,
            limit=limit,
            readers=readers,
            sized=text.image_tokens,
        )
    except RolloutFault:
        return False
    return True


def _other_readers(config: RunConfig, text: Text) -> dict[str, Reader]:
    """For teachers with a separate template that the run does not use: how it reads rows."""
    named = ((one.key, ModelFiles.read(one.model, weights=False)) for one in named_models(config))
    files = {f"{key}.model": read for key, read in named if read is not None}
    found: dict[str, Reader] = {}
    for name, teacher in config.teachers.items():
        if has_unused_template(config, files, name):
            own = {**config.teachers, name: teacher.model_copy(update={"own_template": True})}
            with suppress(ValueError):  # it cannot end as the student's does: no run can use it
                readers = teacher_readers(config.model_copy(update={"teachers": own}), text)
                found |= {name: readers[name]} if name in readers else {}
    return found


def _rendered(
    prompts: Sequence[Prompt], rows: Sequence[Row], reader: Reader | None
) -> list[Prompt] | None:
    """The prompts as the teacher's own template renders them.

    None if it has none, if these are the run's, or if the template refuses one, as the doctor says.
    """
    if reader is None:
        return None
    try:
        ids = [np.array(reader(row), np.int32) for row in rows]
    except Exception:  # a chat template can raise anything
        return None
    seen = (prompt.for_teacher.token_ids for prompt in prompts)
    if all(np.array_equal(one, other) for one, other in zip(seen, ids, strict=True)):
        return None
    return [replace(prompt, teacher_ids=own) for prompt, own in zip(prompts, ids, strict=True)]


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
