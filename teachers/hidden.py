"""Scores from a pooling engine: the states after the last norm, at the response's positions only.

    prompt + response[:-1] ──engine──► states [P+R-1, H] ──last R rows──► HiddenStates [R, H]
                                                                     └──► head ──► CandidateLogprobs

Row P-1+i predicts response token i. The last token predicts nothing that was sampled, and is not
sent.
"""

from __future__ import annotations

import asyncio

import numpy as np
import torch
from vllm import PoolingParams
from vllm.inputs import TokensPrompt
from vllm.v1.engine.async_llm import AsyncLLM

from async_opd.core.errors import StageError
from async_opd.core.head_files import HeadFiles
from async_opd.core.samples import CandidateLogprobs, HiddenStates, Rollout, StateDtype
from teachers.candidates import candidates, sampled_and_candidates
from teachers.head import Head
from teachers.spec import TeacherEngineSpec

NAMES: dict[torch.dtype, StateDtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class States:
    """The final hidden states themselves; whoever has the head makes of them what it wants."""

    def __init__(self, spec: TeacherEngineSpec, engine: AsyncLLM) -> None:
        self._name = spec.name
        self._engine = engine
        model = engine.vllm_config.model_config
        self._empty = torch.zeros((0, model.get_hidden_size()), dtype=model.dtype)

    @property
    def dtype(self) -> torch.dtype:
        """Precision of the states."""
        return self._empty.dtype

    async def score(self, rollout: Rollout, request_id: str) -> HiddenStates:
        """HiddenStates in the model's own precision; bfloat16 travels as its bits."""
        states = await self.states(rollout, request_id)
        bits = states.view(torch.uint16) if states.dtype == torch.bfloat16 else states
        return HiddenStates(bits.numpy(), NAMES[states.dtype])

    async def states(self, rollout: Rollout, request_id: str) -> torch.Tensor:
        """[R, H]."""
        response = len(rollout.response_ids)
        if response == 0:
            return self._empty
        tokens = [*rollout.prompt.token_ids.tolist(), *rollout.response_ids[:-1].tolist()]
        params = PoolingParams(task="token_embed", use_activation=False)
        request = TokensPrompt(prompt_token_ids=tokens)
        async for output in self._engine.encode(request, params, request_id):
            if output.finished:
                return self._checked(output.outputs.data, len(tokens), rollout)[-response:]
        raise StageError(self._name, f"the engine ended {rollout.uid} without a final output")

    def _checked(self, states: torch.Tensor, tokens: int, rollout: Rollout) -> torch.Tensor:
        if states.shape != (tokens, self._empty.shape[1]):
            raise StageError(
                self._name,
                f"states of shape {tuple(states.shape)} for the {tokens} tokens of {rollout.uid}",
            )
        return states.to(self.dtype)


class GivenTokensByHead:
    """The teacher's log-probabilities of the student's own top-k, by a head in this process."""

    def __init__(self, spec: TeacherEngineSpec, engine: AsyncLLM) -> None:
        self._name = spec.name
        self._states = States(spec, engine)
        self._head = Head(HeadFiles.read(spec.kwargs["model"]), self._states.dtype)

    async def score(self, rollout: Rollout, request_id: str) -> CandidateLogprobs:
        """CandidateLogprobs of ``rollout.topk_ids`` and of the sampled tokens."""
        ids = sampled_and_candidates(rollout, self._name)
        states = await self._states.states(rollout, request_id)
        return candidates(ids, await asyncio.to_thread(self._logprobs, states, ids))

    def _logprobs(self, states: torch.Tensor, ids: np.ndarray) -> np.ndarray:
        found = self._head.logprobs(states, torch.from_numpy(ids).long())
        return found.numpy()
