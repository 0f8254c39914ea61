"""One replica of the student: an engine that answers the prompts of a run and of evaluations.

    group of a prompt ──rollout──► engine ──finished, one by one──► outbox of its teacher
                                     ▲                                │ put (waits for room)
              pause · receive · finish · resume                       ▼
                     (weight sync)                            topic rollouts/<teacher>

Consumes prompts, produces rollouts with the version of every token, waits for the engine, for room
in the queue and, in a weight sync, for ``resume``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from vllm import SamplingParams
from vllm.exceptions import VLLMClientError
from vllm.sampling_params import RequestOutputKind

from async_opd.core.errors import RolloutFault, StageError, TransferAborted
from async_opd.core.reports import GRADE, Progress, StageReport
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.stages import Queue, SamplingSpec
from async_opd.core.uid import Uid, turn_uid
from async_opd.environments.episode import EpisodePlayer
from async_opd.media.cache import MediaCache, with_images
from async_opd.media.engine_prompts import EnginePrompt
from async_opd.models.engine_args import sleep_level
from async_opd.observability.activity import Activity
from async_opd.waiting.deadline import Gate, race
from async_opd.weight_sync.freshness import Evidence
from async_opd.weight_sync.layout import HeldRow
from rollouter.engine import (
    StudentEngine,
    held_logprobs,
    load_watcher,
    refuse_foreign_tokens,
    rollout_of,
    rounding_of,
)
from rollouter.evaluation_worker import EvaluationWorker
from rollouter.rollout_worker import RewardGrader, RolloutWorker
from rollouter.slots import AdaptiveLimit, EngineLoad, Slots, first_limit
from rollouter.spec import StudentEngineSpec

PAUSE = {
    "keep": {"mode": "keep", "clear_cache": False},
    "recompute": {"mode": "keep", "clear_cache": True},
    "finish": {"mode": "wait", "clear_cache": True},
}
"""How vLLM's pause treats requests in flight. ``clear_cache`` with ``keep`` preempts them: the
engine computes their KV cache again from their tokens, with the new weights."""
COUNTERS = ("tokens", "request_s", "paused_s")
WAITS = {
    "weights": "the newest weights",
    "gpu": "its GPU, which others use",
    "prompts": "prompts (admission)",
    "environment": "environments of episodes",
}
"""Causes for which a replica computes nothing: the key ``wait_<cause>_s``, and in words."""


def cause_of(*, paused: bool, asleep: bool) -> str:
    """Why the engine has no request now; a weight sync comes before the GPU's other users."""
    if paused:
        return "weights"
    return "gpu" if asleep else "prompts"


class StudentReplica(StudentEngine):
    """An engine of the student that takes its requests from the queue."""

    def __init__(
        self, spec: StudentEngineSpec, queue: Queue, media: MediaCache | None = None
    ) -> None:
        self._media = media
        adaptive = AdaptiveLimit(spec.kwargs["max_num_seqs"])
        first = first_limit(spec.concurrency, adaptive.max_num_seqs)
        self._slots = slots = Slots(first, spec.sampling.n)
        self._grader = RewardGrader(spec.grader, spec.kwargs["model"]) if spec.grader else None
        self._activity = Activity("generate", track=spec.name, causes=[*WAITS], cause=self._cause)
        grade = self._activity.followed(GRADE, self._grader.grade) if self._grader else None
        self._rollouts = Gate()  # inside are the engine's requests for rollouts
        self._computed = self._pending_tokens = 0  # computed since the start; at most to come

        def observe(load: EngineLoad) -> None:
            if spec.concurrency == "auto":
                slots.resize(adaptive.observe(load))

        super().__init__(spec, media, load_watcher(observe, self._compute))
        self._player, self._episodes, play = None, None, None
        if spec.episodes is not None:
            longest = int(self._engine.vllm_config.model_config.max_model_len)
            self._player = EpisodePlayer.of(spec.episodes, longest)
            # One of these for an episode from its start to its end, an engine's slot for each turn
            self._episodes = Slots(self._player.config.concurrency, spec.sampling.n)
            play = self._player.play
        room = self._episodes or slots
        self._worker = RolloutWorker(spec.consumer, queue, room, self._roll, grade=grade)
        self._evaluation = EvaluationWorker(slots, self._sample, play, room)
        self._requests = 0
        self._counters = dict.fromkeys(COUNTERS, 0.0)  # since the last report
        self._pause_started = self._total_paused_s = 0.0  # all pauses since the start
        self._unpaused, self._syncing, self._gate = asyncio.Event(), asyncio.Event(), Gate()
        self._unpaused.set()

    async def run(self) -> None:
        """Answers groups from topic ``prompts`` until stopped; none if it only evaluates."""
        work = asyncio.Event().wait() if self._spec.evaluates else self._worker.run()
        await self._exit_watch.within(work)

    async def stop(self) -> None:
        """See RolloutWorker.stop. An evaluation's requests end, too: ``sleep`` waits for none."""
        await self.stop_evaluation()
        await self._worker.stop()

    async def stop_evaluation(self) -> None:
        """See EvaluationWorker.stop."""
        self._evaluation.stop()

    async def _roll(self, prompt: Prompt, uid: Uid) -> Rollout:
        """A rollout for the worker. RolloutFault for a prompt that the engine refuses."""
        if self._player is None:
            return await self._turn(prompt, uid, self._spec.sampling)
        first = 0

        async def turn(asked: Prompt, uid: Uid, sampling: SamplingSpec, number: int) -> Rollout:
            nonlocal first  # further tries begin with another first turn
            kept = first if number and self._spec.turn_cache == "episode" else None
            made = await self._turn(asked, uid, sampling, number, kept)
            first = first if number else self._syncs
            return made

        return await self._player.play(prompt, uid, self._spec.sampling, turn, self._slots.reserve)

    async def _turn(
        self,
        prompt: Prompt,
        uid: Uid,
        sampling: SamplingSpec,
        turn: int = 0,
        cached: int | None = None,
    ) -> Rollout:
        """A rollout, or the ``turn`` of an episode; ``cached``: see ``_answer``."""
        begun = self._activity.clock() - self._total_paused_s
        refuse_foreign_tokens(prompt, uid, self._engine.vllm_config.model_config.get_vocab_size())
        try:
            rollout = await self._sample(prompt, uid, sampling, turn, trains=True, cached=cached)
        except (VLLMClientError, ValueError) as error:
            raise RolloutFault("student", f"the engine refuses {uid}: {error}") from error
        self._counters["request_s"] += self._activity.clock() - self._total_paused_s - begun
        return rollout

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """See EvaluationWorker."""
        return await self._evaluation.generate(prompts, sampling)

    async def _sample(
        self,
        prompt: Prompt,
        uid: Uid,
        sampling: SamplingSpec,
        turn: int = 0,
        trains: bool = False,
        cached: int | None = None,
    ) -> Rollout:
        """One answer: a rollout that ``trains``, or an evaluation's; or a turn of such."""
        self._requests += 1
        name = f"{uid}#{self._requests}"  # an evaluation's prompt may have the uid of another
        top_k = self._spec.top_k if trains else 0
        asked = self._spec.request(turn_uid(uid, turn), sampling, top_k) | self._never
        params = SamplingParams(**asked, output_kind=RequestOutputKind.FINAL_ONLY)
        shown = await self._prompts.of(prompt)
        max_tokens = len(shown.prompt.token_ids) + sampling.max_tokens
        self._pending_tokens += max_tokens
        try:
            async with self._gate:
                await self._unpaused.wait()
                async with self._rollouts if trains else Gate():
                    rollout = await self._answer(name, shown, uid, params, trains, cached)
        finally:
            self._pending_tokens -= max_tokens
        return rollout or await self._sample(prompt, uid, sampling, turn, trains, cached)

    async def _answer(
        self,
        name: str,
        shown: EnginePrompt,
        uid: Uid,
        params: SamplingParams,
        trains: bool,
        cached: int | None,
    ) -> Rollout | None:
        """The engine's answer; None if a sync overtook its request: the caller repeats it.

        ``version`` is read when the request is sent. A sync may follow before the engine begins,
        and what is cached of the prompt is then of older weights than the first sampled token. A
        turn that reads what was ``cached`` after so many syncs, as one long request would, may.
        """
        version = self._version
        request: Any = shown.request(f"s{self._syncs if cached is None else cached}")
        with self._activity.busy() as begun:
            outputs = self._engine.generate(request, params, name, lora_request=self._adapter)
            async for output in outputs:
                if output.finished:
                    k = int(params.logprobs or 0)
                    rollout = rollout_of(uid, shown.prompt, output.outputs[0], k)
                    self._counters["tokens"] += len(rollout.response_ids)
                    if trains:  # an evaluation's prompt may have the uid of another
                        self._activity.sampled(uid, begun)
                    newer = any(span.version > version for span in rollout.version_spans[:1])
                    older = cached is None and (output.num_cached_tokens or shown.rendered)
                    return None if newer and older else rollout
        raise StageError(self._spec.name, f"the engine ended {uid} without a final output")

    # ── weight sync ────────────────────────────────────────────────────────────────────────────

    async def pause(self, on_sync: str) -> None:
        """Stops sampling; ``on_sync`` names what happens to requests in flight.

        New requests wait outside of the engine: one that entered now would have the cache salt of
        the old version, and could find prefix-cache blocks of the old weights.
        """
        if self._mixed:
            return  # paused since then
        self._unpaused.clear()
        self._syncing.set()
        self._pause_started = self._activity.clock()
        if on_sync == "finish":
            await self._exit_watch.within(self._rollouts.empty())
            self._evaluation.break_off()
        await self._exit_watch.within(self._engine.pause_generation(**PAUSE[on_sync]))

    async def resume(self) -> None:
        """Continues sampling after ``pause``. TransferAborted with weights of two versions."""
        if self._mixed:
            raise TransferAborted(self._spec.name, f"it stays paused: {self._mixed}")
        await self._exit_watch.within(self._engine.resume_generation())
        self._syncing.clear()
        self._unpaused.set()
        self._evaluation.go_on()
        paused_s = self._activity.span("sync", self._pause_started)
        self._counters["paused_s"] += paused_s
        self._total_paused_s += paused_s

    async def evidence(self, rows: Sequence[HeldRow]) -> Evidence:
        """Log-probabilities of the rows under the current weights, and digests of these."""
        self._requests += 1
        async with self._gate:
            await self._unpaused.wait()
            held = (self._engine, rows, self._requests, self._prompts, self._adapter)
            logprobs = await self._exit_watch.within(held_logprobs(*held))
        loaded = await self._rpc("loaded_digests")
        return Evidence(logprobs, tuple(loaded), rounding_of(self._engine.vllm_config))

    # ── time sharing with colocated teachers ───────────────────────────────────────────────────

    async def idle(self) -> None:
        """Returns when the engine has no request."""
        await self._gate.empty()

    async def sleep(self) -> None:
        """Finishes the requests in flight, and frees the GPU; new requests wait.

        A ``wake`` before they are finished keeps the engine awake: the caller of ``sleep`` died.
        """
        if await self._gate.close():
            await self._engine.sleep(level=sleep_level(self._spec.kwargs), mode="wait")
            await self._rpc("refuse_broken_sleep")

    async def wake(self) -> None:
        """Takes the GPU back, with the weights from before ``sleep``."""
        self._gate.abandon_close()
        await self._engine.wake_up()
        await self._rpc("refuse_broken_sleep")
        self._gate.open()

    def _compute(self, tokens: int) -> None:
        self._computed += tokens

    async def progress(self) -> Progress:
        """See async_opd.sharing.time_sharing.GpuHost."""
        return Progress(self._computed, self._pending_tokens)

    # ── supervision ────────────────────────────────────────────────────────────────────────────

    async def alive(self) -> None:
        """Returns when the engine answers; in a weight sync at once, since a sync has timeouts."""
        await race(self._engine.get_weight_version(), self._syncing.wait())

    async def report(self) -> StageReport:
        """The report since the last one; raises if the engine has died."""
        await self._engine.check_health()
        rollouts = {"rollouts": float(self._worker.rollouts)}
        report = StageReport(
            counters=self._counters | rollouts | self._activity.drain_waits(),
            gauges={
                "in_flight": float(self._activity.depth),
                "limit": float(self._slots.limit),
                "grading": float(self._worker.grading),
                "version": float(self._version),
                **({} if self._player is None else self._player.gauges),
            },
            busy=self._activity.drain(),
            waits_for="" if self._activity.depth and not self._mixed else WAITS[self._cause()],
            spans=self._activity.drain_spans(),
        )
        self._counters, self._worker.rollouts = dict.fromkeys(COUNTERS, 0.0), 0
        return with_images(report, self._media)

    def _cause(self) -> str:
        cause = cause_of(paused=not self._unpaused.is_set(), asleep=self._gate.closed)
        plays = self._episodes is not None and self._episodes.running > 0
        return "environment" if plays and cause == "prompts" else cause

    async def shutdown(self) -> None:
        """Ends the processes of the engine, of the grader and of environments."""
        if self._grader is not None:
            self._grader.close()
        if self._player is not None:
            self._player.environments.close()
        self._engine.shutdown()
