"""One replica of a teacher: a vLLM engine that scores the student's tokens.

rollouts ──scoring.py──► engine, worker.py in it ──► arrays of the response positions
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from vllm import AsyncEngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from async_opd.core.batch import Batch, unpack
from async_opd.core.errors import StageError
from async_opd.core.samples import FinishReason, Prompt, Rollout, Sample
from async_opd.core.stages import SamplingSpec, StageReport
from async_opd.core.uid import Uid, rollout_uid
from async_opd.models.engine_args import sleep_level
from async_opd.observability.activity import Activity
from teachers.agreement import Agreement
from teachers.scoring import RequestScoring, engine_arguments
from teachers.spec import TeacherEngineSpec


class TeacherReplica:
    """A vLLM engine with a teacher's weights."""

    def __init__(self, spec: TeacherEngineSpec) -> None:
        self._spec = spec
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(spec)))
        self._scoring = RequestScoring(spec, self._engine)
        self._activity = Activity("score")
        self._requests = 0
        self._tokens = 0
        self._samples = 0
        self._batches = 0
        self._agreement = Agreement()
        self._unpaused = asyncio.Event()
        self._unpaused.set()

    async def ready(self) -> int:
        """Waits until the engine's own process answers. Returns its number of workers.

        A process that is stopped looks healthy from outside.
        """
        await self._engine.check_health()
        await self._engine.get_weight_version()
        return int(self._engine.vllm_config.parallel_config.world_size)

    async def score(self, batch: Batch) -> Batch:
        """Scores a batch of rollouts: the samples, in the same order."""
        rollouts = unpack(Rollout, [batch])
        with self._activity.busy():
            samples = await asyncio.gather(*(self._score(rollout) for rollout in rollouts))
        self._batches += 1
        self._samples += len(rollouts)
        self._tokens += sum(rollout.tokens for rollout in rollouts)
        self._agreement.add(samples)
        return Batch.pack(samples)

    async def _score(self, rollout: Rollout) -> Sample:
        """The student's top-k is in the scores then, and travels no further with the rollout."""
        seen, uid = rollout.seen_by_teacher, rollout.uid
        await self._unpaused.wait()
        scores = await self._scoring.score(seen, self._next_id(uid))
        return Sample(rollout.without_teacher_inputs, scores)

    def _next_id(self, uid: Uid) -> str:
        self._requests += 1
        return f"{uid}#{self._requests}"

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """What the teacher itself answers, ``sampling.n`` times each, in order."""
        return list(
            await asyncio.gather(
                *(
                    self._sample(prompt, rollout_uid(prompt.uid, index), sampling)
                    for prompt in prompts
                    for index in range(sampling.n)
                )
            )
        )

    async def _sample(self, prompt: Prompt, uid: Uid, sampling: SamplingSpec) -> Rollout:
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            min_p=sampling.min_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(self._spec.eos_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        seen = prompt.seen_by_teacher.token_ids
        request = TokensPrompt(prompt_token_ids=seen.tolist())
        await self._unpaused.wait()
        with self._activity.busy():
            async for output in self._engine.generate(request, params, self._next_id(uid)):
                if output.finished:
                    found = output.outputs[0]
                    finish: FinishReason = "stop" if found.finish_reason == "stop" else "length"
                    return Rollout.answer(uid, prompt, found.token_ids, finish)
        raise StageError(self._spec.name, f"the engine ended {uid} without a final output")

    async def load(self, directory: str) -> None:
        """New weights. What is in the engine is finished with the old ones, the rest waits.

        After an error the weights may be half of each: the replica must be replaced.
        """
        self._unpaused.clear()
        await self._engine.pause_generation(mode="wait", clear_cache=True)
        await self._engine.collective_rpc("reload_from", args=(directory,))
        await self._engine.resume_generation()
        self._unpaused.set()

    async def sleep(self) -> None:
        """Leaves the GPU to others: weights go to the host's memory, the KV cache is dropped.

        What is in the engine is finished first, also for a scoring stage that has died meanwhile.
        """
        await self._engine.sleep(level=sleep_level(self._spec.kwargs), mode="wait")

    async def wake(self) -> None:
        """Takes the GPU back."""
        await self._engine.wake_up()

    async def report(self) -> StageReport:
        """What happened since the last report; raises if the engine has died."""
        await self._engine.check_health()
        counters = {
            "tokens": float(self._tokens),
            "samples": float(self._samples),
            "batches": float(self._batches),
            **self._agreement.drain(),
        }
        self._tokens, self._samples, self._batches = 0, 0, 0
        return StageReport(
            counters=counters,
            gauges={"in_flight": float(self._activity.depth)},
            busy=self._activity.drain(),
            waits_for="" if self._activity.depth else "rollouts",
        )

    async def shutdown(self) -> None:
        """Ends the engine's processes."""
        self._engine.shutdown()
