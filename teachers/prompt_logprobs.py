"""Scores from an engine that has its head: prompt log-probabilities, copied out as arrays."""

from __future__ import annotations

import numpy as np
from vllm import SamplingParams
from vllm.inputs import TokensPrompt
from vllm.logprobs import FlatLogprobs
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from async_opd.core.errors import StageError
from async_opd.core.samples import (
    CandidateLogprobs,
    Float32,
    Int32,
    Rollout,
    SampledLogprobs,
    Scores,
    TopK,
)
from teachers.candidates import candidates, sampled_and_candidates
from teachers.spec import TeacherEngineSpec


class PromptLogprobs:
    """The sampled token's log-probability and, with ``top_k``, those of the teacher's best."""

    def __init__(self, spec: TeacherEngineSpec, engine: AsyncLLM) -> None:
        self._spec = spec
        self._engine = engine

    async def score(self, rollout: Rollout, request_id: str) -> Scores:
        """SampledLogprobs or TopK. The engine computes the prompt's rows too; they stay there."""
        response, columns = len(rollout.response_ids), self._spec.top_k + 1
        if response == 0:
            empty = np.zeros((0, columns))
            return _scores(empty.astype(np.int32), empty.astype(np.float32))
        params = SamplingParams(prompt_logprobs=self._spec.top_k, flat_logprobs=True, **_SCORE_ONLY)
        output = await _final(self._engine, rollout, params, request_id, self._spec.name)
        flat = output.prompt_logprobs
        if not isinstance(flat, FlatLogprobs):
            raise StageError(self._spec.name, f"no flat log-probabilities for {rollout.uid}")
        start = flat.start_indices[-response]
        logprobs = np.asarray(flat.logprobs[start:], np.float32).reshape(response, columns)
        ids = np.asarray(flat.token_ids[start:], np.int32).reshape(response, columns)
        return _scores(ids, logprobs)


class GivenTokens:
    """The teacher's log-probabilities of the student's own top-k. Not yet run on a GPU.

    vLLM gathers the given tokens' log-probabilities on the GPU, for the response's rows only, and
    returns them as one array; -1 pads, and comes back as -inf.
    """

    def __init__(self, spec: TeacherEngineSpec, engine: AsyncLLM) -> None:
        self._spec = spec
        self._engine = engine
        self._vocabulary = int(engine.vllm_config.model_config.get_vocab_size())

    async def score(self, rollout: Rollout, request_id: str) -> CandidateLogprobs:
        """CandidateLogprobs of ``rollout.topk_ids`` and of the sampled tokens."""
        ids = sampled_and_candidates(rollout, self._spec.name)
        if len(ids) == 0:
            return candidates(ids, np.zeros(ids.shape, np.float32))
        params = SamplingParams(
            prompt_logprob_token_ids=np.where(ids < self._vocabulary, ids, -1),
            prompt_logprob_start=len(rollout.prompt.token_ids) - 1,
            **_SCORE_ONLY,
        )
        output = await _final(self._engine, rollout, params, request_id, self._spec.name)
        found = output.prompt_token_id_logprobs
        if found is None or found.shape != ids.shape:
            shape = None if found is None else found.shape
            raise StageError(
                self._spec.name, f"scores of shape {shape} instead of {ids.shape} for {rollout.uid}"
            )
        return candidates(ids, found)


_SCORE_ONLY = {
    "max_tokens": 1,
    "temperature": 0.0,
    "detokenize": False,
    "output_kind": RequestOutputKind.FINAL_ONLY,
}


async def _final(
    engine: AsyncLLM, rollout: Rollout, params: SamplingParams, request_id: str, name: str
) -> RequestOutput:
    tokens = [*rollout.prompt.token_ids.tolist(), *rollout.response_ids.tolist()]
    async for output in engine.generate(TokensPrompt(prompt_token_ids=tokens), params, request_id):
        if output.finished:
            return output
    raise StageError(name, f"the engine ended {rollout.uid} without a final output")


def _scores(ids: Int32, logprobs: Float32) -> Scores:
    """Column 0 is the sampled token, then come the k best."""
    if ids.shape[1] == 1:
        return SampledLogprobs(logprobs[:, 0])
    return TopK(
        ids=np.ascontiguousarray(ids[:, 1:]),
        logprobs=np.ascontiguousarray(logprobs[:, 1:]),
        sampled_logprobs=np.ascontiguousarray(logprobs[:, 0]),
    )
