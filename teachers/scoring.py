"""How one kind of engine gives the scores of every objective.

    tokens ──engine, whose worker scores the rows that predict the response──► one array ──► Scores

    kind           wanted of each of these rows                  scores
    sampled        the sampled token                             SampledLogprobs
    teacher_topk   the sampled token, the k best, the rest       TopK
    student_topk   that, and the student's k best, the rest      CandidateLogprobs
    hidden         the hidden state                              HiddenStates

Tokens after the last of these rows predict no sampled token, and are not sent. The engine can
answer prompts as well. vLLM's own ``prompt_logprob_token_ids`` (GPU) is not used: it requires the
last token, which does not fit where a response ends at the model's maximal length, supports
temperature 1 only, and returns one contiguous range of rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm import SamplingParams
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM

from async_opd.core.bounded import BoundedDict
from async_opd.core.errors import StageError
from async_opd.core.row import Media
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.scores import (
    CandidateLogprobs,
    HiddenStates,
    SampledLogprobs,
    Scores,
    StateDtype,
    TopK,
)
from async_opd.core.sequence import Float32, Int32, Range
from async_opd.media.cache import MediaCache
from async_opd.media.engine_prompts import EnginePrompt
from async_opd.models.processor import prompts_of
from teachers.rows import RowRequest, logprobs_of
from teachers.spec import TeacherEngineSpec

UNKNOWN_LOGPROB = -100.0
"""Log-probability of a token that the teacher's head has no row for (the student's vocabulary is
padded further), and of a rest of only such tokens. Its probability is nearly 0 (4e-44), and it is
finite, so that sums and gradients are finite too."""
MAX_SEEN_PREFIXES = 1 << 16
"""Number of prefixes whose hashes a replica keeps."""
DTYPE_NAMES: dict[torch.dtype, StateDtype] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}


class RequestScoring:
    """Scores rollouts on one engine."""

    def __init__(
        self, spec: TeacherEngineSpec, engine: AsyncLLM, media: MediaCache | None = None
    ) -> None:
        self._spec = spec
        self._engine = engine
        self._prompts, self._never = prompts_of(engine, spec.name, media)
        model = engine.vllm_config.model_config
        self._hidden = int(model.get_hidden_size())
        self._dtype = DTYPE_NAMES[model.dtype]
        self._block = int(engine.vllm_config.cache_config.block_size)
        self._seen_prefixes: BoundedDict[int, None] = BoundedDict(MAX_SEEN_PREFIXES)

    async def score(self, rollout: Rollout, request_id: str) -> Scores:
        """The rollout's scores, empty for an empty response. The engine must not know the id.

        The prompt's images are expanded as the engine does it. Raises what EnginePrompts.of raises.
        """
        shown = await self._prompts.of(rollout.prompt)
        rollout = rollout.after(shown.prompt) if shown.rendered else rollout
        ids = self._ids(rollout)
        wanted = self._wanted(rollout.rows, ids)
        return self._scores(ids, wanted, await self._rows(rollout, shown, wanted, request_id))

    async def _rows(
        self, rollout: Rollout, shown: EnginePrompt, wanted: RowRequest, request_id: str
    ) -> NDArray[Any]:
        """The wanted rows as the worker returned them: [rows, width] scores or [rows, H] states.

        Rollouts of one group share the prefill of their prompt through the prefix cache. Where the
        cache also held a wanted row, the engine did not compute it, and a second request reads no
        cache.
        """
        expected = (wanted.rows, self._hidden if wanted.states else wanted.width)
        if not wanted.ranges:
            dtype = self._dtype.replace("bfloat16", "int16") if wanted.states else "int32"
            return np.zeros(expected, dtype)
        ids = rollout.token_ids[: wanted.end]
        cached = self._may_read_cache(ids, shown.prompt.media, wanted.ranges[0][0])
        request = shown.request("", ids[len(shown.prompt.token_ids) :].tolist())
        found = await self._ask(request, wanted, request_id, cached=cached)
        if cached and (found is None or len(found) == 0):
            found = await self._ask(request, wanted, f"{request_id}~", cached=False)
        if found is None or found.shape != expected:
            shape = None if found is None else found.shape
            cause = f"the engine returned scores of shape {shape}, not {expected}, for {request_id}"
            raise StageError(self._spec.name, cause)
        return found

    def _ids(self, rollout: Rollout) -> Int32:
        """Tokens to score, [R, 1 + k]: the sampled one, then the student's best, if wanted.

        The sampled token may be among the best too.
        """
        sampled = rollout.response_ids[:, None]
        if self._spec.kind != "student_topk":
            return np.ascontiguousarray(sampled, np.int32)
        if rollout.topk_ids is None:
            cause = f"rollout {rollout.uid} came without the student's top-k"
            raise StageError(self._spec.name, cause)
        return np.hstack([sampled, rollout.topk_ids]).astype(np.int32, copy=False)

    def _wanted(self, ranges: tuple[Range, ...], ids: Int32) -> RowRequest:
        states = self._spec.kind == "hidden"
        return RowRequest(
            ranges=ranges,
            ids=b"" if states else ids.tobytes(),
            columns=0 if states else ids.shape[1],
            top_k=self._spec.top_k if self._spec.kind == "teacher_topk" else 0,
            temperature=self._spec.temperature,
        )

    def _may_read_cache(self, tokens: Int32, media: tuple[Media, ...], first: int) -> bool:
        """Whether no cached block can hold row ``first`` or a later one.

        The prefix cache holds whole blocks. It has the block of row ``first`` if another sequence
        began with the same tokens up to the end of that block.
        """
        end = (first // self._block + 1) * self._block
        if len(tokens) < end:
            return True
        head = hash((tokens[:end].tobytes(), media))
        known = head in self._seen_prefixes
        self._seen_prefixes[head] = None
        return not known

    async def _ask(
        self, request: Any, wanted: RowRequest, request_id: str, *, cached: bool
    ) -> NDArray[Any] | None:
        params = SamplingParams(
            max_tokens=1,
            temperature=0.0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            skip_reading_prefix_cache=not cached,
            extra_args=wanted.arguments(),
        )
        output = await self._final_output(request, params, request_id)
        found: NDArray[Any] | None = output.prompt_token_id_logprobs
        return found

    async def answer(
        self, prompt: Prompt, sampling: dict[str, Any], request_id: str
    ) -> RequestOutput:
        """The engine's own answer to a prompt; ``sampling`` are vLLM's parameters."""
        request: Any = (await self._prompts.of(prompt)).request("")
        params = SamplingParams(
            **sampling | self._never, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        return await self._final_output(request, params, request_id)

    async def _final_output(
        self, request: Any, params: SamplingParams, request_id: str
    ) -> RequestOutput:
        """The engine's finished output of a request. StageError if it ends without one."""
        async for output in self._engine.generate(request, params, request_id):
            if output.finished:
                return output
        raise StageError(self._spec.name, f"the engine ended {request_id} without a final output")

    def _scores(self, ids: Int32, wanted: RowRequest, found: NDArray[Any]) -> Scores:
        if wanted.states:
            bits = found.view(np.uint16) if self._dtype == "bfloat16" else found
            return HiddenStates(bits, self._dtype)
        logprobs = logprobs_of(found, wanted.top_k)
        sampled = np.ascontiguousarray(logprobs[:, 0])
        if self._spec.kind == "sampled":
            return SampledLogprobs(sampled)
        support, rest = np.ascontiguousarray(logprobs[:, 1:-1]), finite(logprobs[:, -1])
        if self._spec.kind == "teacher_topk":
            return TopK(np.ascontiguousarray(found[:, -wanted.top_k :]), support, sampled, rest)
        candidates = np.ascontiguousarray(ids[:, 1:])
        return CandidateLogprobs(candidates, finite(support), finite(sampled), rest)


def finite(logprobs: Float32) -> Float32:
    """Values below ``UNKNOWN_LOGPROB``, -inf among them, become ``UNKNOWN_LOGPROB``."""
    return np.maximum(logprobs, np.float32(UNKNOWN_LOGPROB), dtype=np.float32)
