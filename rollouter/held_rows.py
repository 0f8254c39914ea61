"""How a student engine scores held rows: vLLM's prompt log-probabilities, in separate seats."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.v1.engine.async_llm import AsyncLLM

from async_opd.core.arrays import Float32
from async_opd.core.errors import StageError
from async_opd.media.engine_prompts import EnginePrompts
from async_opd.waiting.deadline import gather_or_cancel
from async_opd.weight_sync.layout import MOST_ROWS, HeldRow
from rollouter.freshness_worker import ADAPTER_ID

QUANTIZED_ROUNDING = 2.0**-4
"""Largest relative error of one rounding to a number of 3 bits after the point, such as float8."""

TF32_ROUNDING = 2.0**-11
"""The same of TF32: vLLM's attention on GPUs in float32 is Triton's (``TRITON_ATTN``), whose
``tl.dot`` rounds its operands to TF32 by default."""
ADAPTER = LoRARequest("student", ADAPTER_ID, "sent by the trainer")
"""The adapter that every request to an engine with an adapter names. vLLM never reads the path: the
adapter is always loaded."""


def with_seats(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The engine arguments with room for the rows above ``max_num_seqs``: they wait little.

    Rollouts that wait in the engine (a sixteenth of ``max_num_seqs``, see ``rollouter.slots``) come
    first, and take these seats, too. So at most that many responses end before the rows begin.
    An engine with one seat gets no more: there a response is never computed in another batch than
    alone, and rows wait for its end.
    """
    seats = int(kwargs["max_num_seqs"])
    most = int(kwargs.get("max_num_batched_tokens") or seats + MOST_ROWS)
    return kwargs if seats == 1 else kwargs | {"max_num_seqs": min(seats + MOST_ROWS, most)}


def rounding_of(config: VllmConfig) -> float:
    """Largest relative error of one rounding in the engine."""
    if config.quant_config is not None:
        return QUANTIZED_ROUNDING
    if current_platform.is_cuda() and config.model_config.dtype == torch.float32:
        return TF32_ROUNDING
    return torch.finfo(config.model_config.dtype).eps / 2


async def held_logprobs(
    engine: AsyncLLM,
    rows: Sequence[HeldRow],
    number: int,
    prompts: EnginePrompts,
    adapter: LoRARequest | None = None,
) -> tuple[Float32, ...]:
    """Log-probabilities of each row's compared tokens, at temperature 1.

    ``number`` is unique; ``prompts`` are the engine's. StageError if the engine ends a request
    without them.
    """
    images = {sha256: encoded for row in rows for sha256, encoded in row.images.items()}
    seen = prompts.of_images(images)
    scoring = (
        _scored(engine, row, f"held#{number}/{index}", seen, adapter)
        for index, row in enumerate(rows)
    )
    return tuple(await gather_or_cancel(*scoring))


async def _scored(
    engine: AsyncLLM, row: HeldRow, name: str, prompts: EnginePrompts, adapter: LoRARequest | None
) -> Float32:
    """Of one row; vLLM reads no cached prefix with ``prompt_logprobs``, the salt makes sure."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    rollout = row.rollout()
    shown = await prompts.of(rollout.prompt)
    ids: list[int] = rollout.continuation.tolist()
    request: Any = shown.request(name, ids)
    async for output in engine.generate(request, params, name, lora_request=adapter):
        if output.finished and output.prompt_logprobs is not None:
            found = zip(output.prompt_logprobs[-len(ids) :], ids, strict=True)
            return np.array([row[token].logprob for row, token in found if row], np.float32)
    raise StageError("student", f"the engine ended the held row {name} without its scores")
