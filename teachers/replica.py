"""One replica of a teacher: a vLLM engine that scores the student's tokens.

rollouts ──segments.py, scoring.py──► engine with scoring_worker.py ──► arrays of positions
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace

from vllm import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.v1.engine import utils
from vllm.v1.engine.async_llm import AsyncLLM

from async_opd.core.batch import Batch
from async_opd.core.errors import RolloutFault
from async_opd.core.reports import StageReport
from async_opd.core.samples import FinishReason, Prompt, Rollout, Sample
from async_opd.core.scores import Scores
from async_opd.core.stages import SamplingSpec
from async_opd.core.uid import Uid, rollout_uid
from async_opd.environments.episode import EpisodePlayer
from async_opd.media.cache import MediaCache, with_images
from async_opd.models.engine_args import fitted, sleep_level, smallest_gpu
from async_opd.processes.engine_workers import on_workers
from async_opd.processes.forked_engine import forked_engine
from async_opd.waiting.deadline import gather_or_cancel
from teachers.meter import ScoringMeter
from teachers.scoring import RequestScoring
from teachers.segments import score_segments
from teachers.spec import TeacherEngineSpec


class TeacherReplica:
    """A vLLM engine with a teacher's weights."""

    def __init__(self, spec: TeacherEngineSpec, media: MediaCache | None = None) -> None:
        self._spec = spec
        worker = {"worker_cls": "teachers.scoring_worker.ScoringWorker"}
        reported = current_platform.get_device_total_memory
        kwargs = fitted(spec.kwargs, spec.beside, lambda: smallest_gpu() or reported())
        with forked_engine(utils, current_platform.is_cpu()):
            self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**kwargs | worker))
        self._media = media
        self._scoring = RequestScoring(spec, self._engine, media)
        self._meter = ScoringMeter(spec.name)
        longest = int(self._engine.vllm_config.model_config.max_model_len)
        episodes = spec.episodes
        self._player = None if episodes is None else EpisodePlayer.of(episodes, longest)
        self._requests = 0
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    async def ready(self) -> int:
        """Waits until the engine's own process answers. Returns its number of workers.

        ``check_health`` alone finds a stopped process healthy.
        """
        await self._engine.check_health()
        await self._engine.get_weight_version()
        await self._refuse_broken_sleep()
        return int(self._engine.vllm_config.parallel_config.world_size)

    async def score(self, batch: Batch) -> Batch:
        """The samples of a batch of rollouts, in the same order."""
        return await self._meter.score(batch, self._score)

    async def _score(self, rollout: Rollout) -> Sample:
        """The sample; its rollout has no student's top-k any more, which the scores contain."""
        scores = await score_segments(self._spec.name, rollout, self._score_segment)
        return Sample(rollout.without_teacher_inputs, scores)

    async def _score_segment(self, segment: Rollout) -> Scores:
        await self._unpaused.wait()
        return await self._scoring.score(segment, self._next_id(segment.uid))

    def _next_id(self, uid: Uid) -> str:
        self._requests += 1
        return f"{uid}#{self._requests}"

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """The teacher's own answers, ``sampling.n`` to each prompt, in order.

        An episode that cannot be played is an answer with its ``fault``.
        """
        return await gather_or_cancel(
            *(
                self._answer(prompt, rollout_uid(prompt.uid, index), sampling)
                for prompt in prompts
                for index in range(sampling.n)
            )
        )

    async def _answer(self, prompt: Prompt, uid: Uid, sampling: SamplingSpec) -> Rollout:
        if self._player is None:
            return await self._sample(prompt, uid, sampling)
        try:
            slots = nullcontext()
            made = await self._player.play(prompt, uid, sampling, self._sample, lambda _: slots)
        except RolloutFault as fault:
            made = Rollout.unanswered(uid, prompt, fault)
        return made.without_row

    async def _sample(
        self, prompt: Prompt, uid: Uid, sampling: SamplingSpec, turn: int = 0
    ) -> Rollout:
        asked = asdict(replace(sampling, n=1)) | {"stop_token_ids": list(self._spec.eos_ids)}
        await self._unpaused.wait()
        with self._meter.activity.busy():
            seen, request_id = prompt.for_teacher, self._next_id(uid)
            output = await self._scoring.answer(seen, asked, request_id)
        found = output.outputs[0]
        finish: FinishReason = "stop" if found.finish_reason == "stop" else "length"
        return Rollout.answer(uid, prompt, found.token_ids, finish)

    async def load(self, directory: str) -> None:
        """Loads new weights. Requests in the engine finish with the old ones, later ones wait.

        After an error the weights may be a mixture of both: the replica must be replaced.
        """
        self._unpaused.clear()
        await self._engine.pause_generation(mode="wait", clear_cache=True)
        await on_workers(self._engine, self._spec.name, "reload_from", directory)
        await self._engine.resume_generation()
        self._unpaused.set()

    async def sleep(self) -> None:
        """Frees the GPU: the weights move to the host's memory, the KV cache is dropped.

        Requests in the engine finish first, also those of a scoring stage that has died meanwhile.
        """
        await self._engine.sleep(level=sleep_level(self._spec.kwargs), mode="wait")
        await self._refuse_broken_sleep()

    async def wake(self) -> None:
        """Moves the weights back to the GPU."""
        await self._engine.wake_up()
        await self._refuse_broken_sleep()

    async def _refuse_broken_sleep(self) -> None:
        await on_workers(self._engine, self._spec.name, "refuse_broken_sleep")

    async def report(self) -> StageReport:
        """The report since the last one; raises if the engine has died."""
        await self._engine.check_health()
        return with_images(self._meter.report(), self._media)

    async def shutdown(self) -> None:
        """Ends the processes of the engine and of environments."""
        if self._player is not None:
            self._player.environments.close()
        self._engine.shutdown()
