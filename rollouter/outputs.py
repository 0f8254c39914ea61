"""The engine's inputs and outputs: lists of a final output become a rollout's arrays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from async_opd.core.errors import RolloutFault
from async_opd.core.samples import Prompt, Rollout, VersionSpan
from async_opd.core.uid import Uid

if TYPE_CHECKING:
    from vllm.outputs import CompletionOutput


def refuse_foreign_tokens(prompt: Prompt, uid: Uid, rows: int) -> None:
    """RolloutFault for a token that is none of the model's ``rows``.

    An engine without a tokenizer does not check tokens, and dies of such a one.
    """
    ids = prompt.token_ids
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < rows:
        found = f"its tokens are from {ids.min()} to {ids.max()}"
        cause = f"the engine refuses {uid}: {found}, the model has {rows}"
        raise RolloutFault("student", cause)


def rollout_of(uid: Uid, prompt: Prompt, output: CompletionOutput, top_k: int) -> Rollout:
    """The rollout of a finished request for ``top_k`` log-probabilities in flat lists.

    At each position the engine lists the sampled token first, then its ``top_k`` best tokens, which
    may include the sampled one. It returns experts if it was started to (``train.routing``).
    """
    ids = np.asarray(output.token_ids, dtype=np.int32)
    flat: Any = output.logprobs
    shape = (len(ids), 1 + top_k)
    logprobs = np.asarray(flat.logprobs, dtype=np.float32).reshape(shape)
    listed = np.asarray(flat.token_ids, dtype=np.int32).reshape(shape)
    spans = output.weight_versions or ()
    rollout = Rollout.plain(
        uid=uid,
        prompt=prompt,
        response_ids=ids,
        rollout_logprobs=np.ascontiguousarray(logprobs[:, 0]),
        version_spans=tuple(VersionSpan(int(s.version), s.start, s.end) for s in spans),
        finish_reason="stop" if output.finish_reason == "stop" else "length",
        topk_ids=np.ascontiguousarray(listed[:, 1:]) if top_k else None,
    )
    return replace(rollout, routed_experts=output.routed_experts)
