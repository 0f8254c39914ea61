"""``doctor --engines``: starts what a run starts, and measures how far its parts are apart.

    all pools ──► responses of the student, one update pushed and proven ──► student's floor
    one scoring engine with the student's weights ──► the same tokens ──┘
    each teacher's replicas, one teacher after the other ──► disagreement of its replicas
    one of low precision again, with the weights of its files ──► the bias of its precision

Nothing of the run is kept: the pools have a directory that is removed.
"""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from async_opd.checks.models import quantization, unproved
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.loss import ForwardKLConfig, K1Config
from async_opd.config.sections.teachers import EndpointTeacher, VllmTeacher
from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import Problem, StageError
from async_opd.core.samples import Prompt, Rollout, Sample
from async_opd.core.scores import SampledLogprobs, Scores, TopK
from async_opd.core.sequence import Float32
from async_opd.files.safe_open import private_files
from async_opd.models.model_files import ModelFiles, is_hub_id, is_vision_model
from async_opd.models.tokenizer import Text
from async_opd.prepare import prepare
from async_opd.tools.doctor.distances import Agreement, PrecisionBias, unknown_bias
from async_opd.tools.doctor.finding import Finding, Status
from async_opd.tools.doctor.pools import (
    DTYPES,
    FRESHNESS,
    TOPIC,
    Measured,
    measure,
    measuring,
    synced,
)
from async_opd.tools.doctor.prompts import sampled_prompts
from async_opd.tools.engines import (
    ITSELF,
    Notify,
    ToolEngines,
    with_itself_as_teacher,
    with_one_teacher,
    with_whole_teacher,
)
from async_opd.waiting.deadline import gather_or_cancel
from async_opd.weight_sync.layout import by_kind

PROMPTS, TOP_K = 32, 64
IMAGE_MASS = "; or tokens that stand for images have that mass: no rollout engine samples them"
NO_TOKEN = "see why responses are empty: doctor's prompts"


async def examine_engines(
    config: RunConfig, engines: ToolEngines, prompts: Sequence[Prompt], folder: Path
) -> list[Finding]:
    """Findings of all measurements; an error of one ends it alone, except that of the pools.

    ``folder`` is the run directory of the pools.
    """
    notify = engines.notify
    examined = _Examined(measuring(config, folder), engines, prompts)
    notify("starting all pools")
    try:
        measured = await measure(examined.config, engines, prompts)
    except Exception as error:  # Ray raises the bare class if it cannot start
        return [_failed("the pools of the run", error)]
    files = ModelFiles.read(config.student.model)
    quantized_by = quantization(config, files) if unproved(config, files) else ""
    found = [*synced(measured, quantized_by)]
    bound = max(map(measured.bound, FRESHNESS))
    notify("starting a scoring engine with the student's weights")
    found += await examined.by_itself(measured, bound)
    for name in config.teachers:
        if unknown := unknown_bias(config, "", name):
            found.append(_of_problem("warning", unknown))
        own = [one for one in measured.responses if one.prompt.teacher == name]
        if not own:
            count = sum(one.teacher == name for one in prompts)
            prompts_of = f"{count} prompt{'s' * (count != 1)} of its sources"
            message = f"teachers.{name}: no token to compare, of {prompts_of}"
            found.append(Finding(TOPIC, "warning", message, NO_TOKEN))
            continue
        notify(f"starting teacher {name}")
        found += await examined.teacher(name, own, bound)
        whole = with_whole_teacher(examined.config, name)
        if whole is not None:
            notify(f"starting teacher {name} again, and with the weights of its files")
            found.append(await examined.bias(whole, name, own))
    return found


@dataclass(frozen=True)
class _Examined:
    """A config, and its engines, which are started one after the other.

    ``prompts`` have the bytes of their images.
    """

    config: RunConfig
    engines: ToolEngines
    prompts: Sequence[Prompt]

    async def by_itself(self, measured: Measured, bound: float) -> list[Finding]:
        """The floor: the student in a scoring engine against the rollout engine and the trainer."""
        alone = self._itself()
        reference = measured.meta.reference
        held = [] if reference is None else [row.rollout() for row in reference.rows]
        shown = [*self.prompts, *(one.prompt for one in held)]
        asked = [*(one.without_teacher_inputs for one in measured.responses), *held]
        try:
            (scores,) = await self._scores(alone, ITSELF, asked, shown)
        except Exception as error:  # Ray raises the bare class if it cannot start
            return [_failed("the scoring engine with the student's weights", error)]
        count = len(measured.responses)
        answered = Agreement.of(
            [one.rollout_logprobs for one in measured.responses], scores[:count]
        )
        what = "its responses, rollout engine against scoring engine"
        other_cause = IMAGE_MASS * is_vision_model(self.config.student.model)
        lines = [_floor(what, answered, bound, other_cause)]
        if reference is not None:
            for kind, indices in by_kind(reference.rows).items():
                pairs = [(reference.logprobs[at], scores[count + at]) for at in indices]
                rows = Agreement.of(*map(list, zip(*pairs, strict=True)))
                what = f"{FRESHNESS[kind][0]}, trainer against scoring engine"
                lines.append(_floor(what, rows, measured.bound(kind)))
        return lines

    async def teacher(self, name: str, responses: Sequence[Rollout], bound: float) -> list[Finding]:
        """How far a teacher's replicas are apart, and a served one from weights on this machine."""
        teacher, own = self.config.teachers[name], with_one_teacher(self.config, name)
        model = teacher.model if isinstance(teacher, EndpointTeacher) else None
        try:
            scores = await self._scores(own, name, responses)
            weights: list[list[Float32]] = []
            if model is not None and not is_hub_id(model):
                local = VllmTeacher(model=model, sources=teacher.sources)
                loaded = own.model_copy(update={"teachers": {name: local}})
                weights = await self._scores(loaded, name, responses)
        except Exception as error:  # Ray raises the bare class if it cannot start
            return [_failed(f"teachers.{name}", error)]
        signal = Agreement.of(scores[0], [one.rollout_logprobs for one in responses]).mean
        pairs = [Agreement.of(one, other) for one, other in combinations(scores, 2)]
        if pairs:
            worst = max(pairs, key=lambda one: one.mean)
            pair = f"the two of its {len(scores)} replicas that are farthest apart"
            lines = [_apart(name, pair, worst, signal, bound)]
        else:
            message = f"teachers.{name}: one replica; from the student it is {signal:.2g} nats"
            lines = [Finding(TOPIC, "ok", message)]
        for one in weights:
            served = Agreement.of(scores[0], one)
            lines.append(_apart(name, "its server and its weights", served, signal, bound))
        return lines

    async def bias(self, whole: RunConfig, name: str, responses: Sequence[Rollout]) -> Finding:
        """The bias of a teacher's precision, an error if it is too large. ``whole``: its files'."""
        low, teacher = with_one_teacher(self.config, name), self.config.teachers[name]
        assert isinstance(teacher, VllmTeacher)
        own = [one.without_teacher_inputs for one in responses]
        asked = ((whole, name, responses), (low, name, responses), (self._itself(), ITSELF, own))
        try:
            scores = [(await self._topk(one, of, read))[0] for one, of, read in asked]
            found = PrecisionBias.of(*scores)
        except Exception as error:  # Ray raises the bare class if it cannot start
            failed = _failed(f"teachers.{name}: the bias of its precision", error)
            return replace(failed, status="warning")
        problem = found.problem("", name, teacher.max_bias)
        if problem is None:
            return Finding(TOPIC, "ok", f"teachers.{name}: {found}")
        return _of_problem("error", problem)

    def _itself(self) -> RunConfig:
        """The config whose only teacher is the student itself."""
        pictured = {one.data_source for one in self.prompts if one.media}
        return with_itself_as_teacher(self.config, pictured)

    async def _topk(
        self, config: RunConfig, name: str, rollouts: Sequence[Rollout]
    ) -> list[list[TopK]]:
        """``_answers`` of a teacher that sends its top-k."""
        files = ModelFiles.read(config.student.model, weights=False)
        rows = None if files is None else files.vocabulary
        loss = ForwardKLConfig(top_k=min(TOP_K, rows or TOP_K))
        config = config.model_copy(update={"loss": loss})
        answers = await self._answers(config, name, rollouts, self.prompts)
        return [[one for one in scores if isinstance(one, TopK)] for scores in answers]

    async def _scores(
        self,
        config: RunConfig,
        name: str,
        rollouts: Sequence[Rollout],
        prompts: Sequence[Prompt] = (),
    ) -> list[list[Float32]]:
        """``_answers`` of a teacher that sends the log-probabilities of each rollout's tokens."""
        config = config.model_copy(update={"loss": K1Config(kind="k1")})
        answers = await self._answers(config, name, rollouts, prompts or self.prompts)
        return [
            [one.logprobs for one in scores if isinstance(one, SampledLogprobs)]
            for scores in answers
        ]

    async def _answers(
        self, config: RunConfig, name: str, rollouts: Sequence[Rollout], prompts: Sequence[Prompt]
    ) -> list[list[Scores]]:
        """For each replica of a teacher the scores of each rollout. StageError.

        ``prompts`` have the bytes of the rollouts' images.
        """
        used = {one.sha256 for rollout in rollouts for one in rollout.prompt.media}
        shown = [one for one in prompts if used.intersection(m.sha256 for m in one.media)]

        def ask(replicas: Sequence[Any]) -> Awaitable[list[Batch]]:
            batch = Batch.pack(rollouts)
            return gather_or_cancel(*(replica.score(batch) for replica in replicas))

        answers = await self.engines.of_teacher(config, name, shown, ask)
        return [[one.scores for one in unpack(Sample, [answer])] for answer in answers]


def _floor(what: str, found: Agreement, bound: float, other_cause: str = "") -> Finding:
    message = f"mismatch floor, the student by itself: {what}: {found}; bound {bound:.2g}"
    if not found.tokens:
        message = f"mismatch floor, the student by itself: {what}: not measured, without any token"
        return Finding(TOPIC, "warning", message, NO_TOKEN)
    fits = found.mean <= bound
    return Finding(
        TOPIC, "ok" if fits else "warning", message, "" if fits else DTYPES + other_cause
    )


def _apart(name: str, pair: str, found: Agreement, signal: float, bound: float) -> Finding:
    """``signal``: mean absolute difference in nats between teacher and student."""
    message = f"teachers.{name}: {pair}: {found}; from the student it is {signal:.2g} nats"
    if found.mean <= bound:
        return Finding(TOPIC, "ok", message)
    remedy = "give all of them the same weights, dtype, quantization and version of the server"
    return Finding(TOPIC, "warning", f"{message}; bound {bound:.2g}", remedy)


def _of_problem(status: Status, problem: Problem) -> Finding:
    return Finding(TOPIC, status, f"{problem.key}: {problem.message}", problem.remedy)


def _failed(what: str, error: Exception) -> Finding:
    cause = f"{error.stage}: {error.cause}" if isinstance(error, StageError) else str(error)
    remedy = error.remedy if isinstance(error, StageError) else ""
    message = f"{what} could not be measured: {cause}"
    return Finding(TOPIC, "error", message, remedy or "see what was printed while it started")


def run_engines(config: RunConfig, where: str, notify: Notify) -> list[Finding]:
    """Downloads what the config names on the hub, and measures. ConfigError before an engine.

    ``notify`` gets a line when something is started.
    """
    import uvloop

    ready = prepare(config, where)
    config, inputs, text = ready.config, ready.inputs, Text.of(ready.config)
    for note in inputs.notes:
        notify(note)
    prompts = sampled_prompts(config, inputs, text, PROMPTS)
    place = None if config.cluster.joins is None else Path(config.run_dir or ".").parent
    with private_files(), TemporaryDirectory(prefix=".doctor-", dir=place) as folder:
        engines = ToolEngines(ready.device, text.response_ends(), notify)
        return list(uvloop.run(examine_engines(config, engines, prompts, Path(folder))))
