"""One replica of a teacher: a vLLM engine that scores the student's tokens.

rollouts ──score──► prompt log-probabilities of the engine ──► arrays of the response positions
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
from vllm import AsyncEngineArgs, SamplingParams
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from async_opd.core.activity import Activity
from async_opd.core.batch import Batch, unpack_rollouts
from async_opd.core.errors import StageError
from async_opd.core.samples import (
    Prompt,
    Rollout,
    Sample,
    SampledLogprobs,
    Scores,
    TopK,
    VersionSpan,
)
from async_opd.core.stages import SamplingSpec, StageReport
from teachers.spec import TeacherEngineSpec


class TeacherReplica:
    """A vLLM engine with a teacher's weights."""

    def __init__(self, spec: TeacherEngineSpec) -> None:
        args = AsyncEngineArgs(**spec.kwargs, max_logprobs=max(spec.top_k, 1))
        self._spec = spec
        self._engine = AsyncLLM.from_engine_args(args)
        self._activity = Activity("score")
        self._requests = 0
        self._tokens = 0
        self._samples = 0
        self._batches = 0

    async def ready(self) -> int:
        """Waits until the engine answers. Returns its number of workers."""
        await self._engine.check_health()
        return int(self._engine.vllm_config.parallel_config.world_size)

    async def score(self, batch: Batch) -> Batch:
        """Scores a batch of rollouts: the samples, in the same order."""
        rollouts = unpack_rollouts([batch])
        with self._activity.busy():
            scores = await asyncio.gather(*(self._score(rollout) for rollout in rollouts))
        self._batches += 1
        self._samples += len(rollouts)
        self._tokens += sum(rollout.tokens for rollout in rollouts)
        return Batch.pack(map(Sample, rollouts, scores))

    async def _score(self, rollout: Rollout) -> Scores:
        response = len(rollout.response_ids)
        if response == 0:
            return _scores(np.zeros((0, self._spec.top_k + 1)), self._spec.top_k)
        tokens = [*rollout.prompt.token_ids.tolist(), *rollout.response_ids.tolist()]
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            prompt_logprobs=self._spec.top_k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        self._requests += 1
        request_id = f"{rollout.uid}#{self._requests}"
        request = TokensPrompt(prompt_token_ids=tokens)
        async for output in self._engine.generate(request, params, request_id):
            if output.finished:
                flat = output.prompt_logprobs
                if not isinstance(flat, FlatLogprobs):
                    raise StageError(
                        self._spec.name, f"no flat log-probabilities for {rollout.uid}"
                    )
                return _response_scores(flat, response, self._spec.top_k)
        raise StageError(self._spec.name, f"the engine ended {rollout.uid} without a final output")

    async def generate(self, prompts: Sequence[Prompt], sampling: SamplingSpec) -> list[Rollout]:
        """What the teacher itself answers, ``sampling.n`` times each, in order."""
        return list(
            await asyncio.gather(
                *(
                    self._sample(prompt, f"{prompt.uid}/{index}", sampling)
                    for prompt in prompts
                    for index in range(sampling.n)
                )
            )
        )

    async def _sample(self, prompt: Prompt, uid: str, sampling: SamplingSpec) -> Rollout:
        self._requests += 1
        params = SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            max_tokens=sampling.max_tokens,
            stop_token_ids=list(self._spec.eos_ids),
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        request = TokensPrompt(prompt_token_ids=prompt.token_ids.tolist())
        with self._activity.busy():
            async for output in self._engine.generate(request, params, f"{uid}#{self._requests}"):
                if output.finished:
                    return _answer(uid, prompt, output.outputs[0])
        raise StageError(self._spec.name, f"the engine ended {uid} without a final output")

    async def report(self) -> StageReport:
        """What happened since the last report; raises if the engine has died."""
        await self._engine.check_health()
        counters = {
            "tokens": float(self._tokens),
            "samples": float(self._samples),
            "batches": float(self._batches),
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


def _response_scores(flat: FlatLogprobs, response: int, top_k: int) -> Scores:
    """The last ``response`` positions: column 0 is the token itself, then the k best."""
    start = flat.start_indices[-response]
    columns = top_k + 1
    logprobs = np.asarray(flat.logprobs[start:], dtype=np.float32).reshape(response, columns)
    ids = np.asarray(flat.token_ids[start:], dtype=np.int32).reshape(response, columns)
    return _scores(logprobs, top_k, ids)


def _scores(logprobs: np.ndarray, top_k: int, ids: np.ndarray | None = None) -> Scores:
    logprobs = logprobs.astype(np.float32, copy=False)
    if top_k == 0:
        return SampledLogprobs(logprobs[:, 0])
    if ids is None:
        ids = np.zeros(logprobs.shape, dtype=np.int32)
    return TopK(
        ids=np.ascontiguousarray(ids[:, 1:]),
        logprobs=np.ascontiguousarray(logprobs[:, 1:]),
        sampled_logprobs=np.ascontiguousarray(logprobs[:, 0]),
    )


def _answer(uid: str, prompt: Prompt, output: CompletionOutput) -> Rollout:
    """An answer of the teacher; its log-probabilities are not asked for, hence NaN."""
    ids = np.asarray(output.token_ids, dtype=np.int32)
    return Rollout(
        uid=uid,
        prompt=prompt,
        response_ids=ids,
        rollout_logprobs=np.full(len(ids), np.nan, dtype=np.float32),
        version_spans=(VersionSpan(0, 0, len(ids)),) if len(ids) else (),
        finish_reason="stop" if output.finish_reason == "stop" else "length",
    )
