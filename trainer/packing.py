"""Ragged samples become micro-batches: one row of tokens each, no padding, a token budget.

    samples ──first fit, longest first──► groups ──► Packed(input_ids [1, T], rows [N], …)

Position ids restart with every sample; with them and no attention mask, transformers keeps packed
samples from attending to each other (tested: packed logits equal each sample's own).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from async_opd.core.errors import LengthError
from async_opd.core.samples import Sample, SampledLogprobs, TopK


@dataclass(frozen=True)
class Packed:
    """One micro-batch. T: tokens; N: response tokens of all samples, in order; k: teacher's top-k.

    ``rows`` [N] are the positions whose logits predict the response tokens ``targets`` [N].
    ``teacher_ids`` and ``teacher_topk_logprobs`` [N, k] are None for sampled-token scores.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor
    rollout_logprobs: torch.Tensor
    teacher_logprobs: torch.Tensor
    teacher_ids: torch.Tensor | None
    teacher_topk_logprobs: torch.Tensor | None

    def to(self, device: torch.device) -> Packed:
        """The same on another device."""
        moved: dict[str, Any] = {
            name: value if value is None else value.to(device, non_blocking=True)
            for name, value in vars(self).items()
        }
        return Packed(**moved)


def plan(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups of indices whose lengths sum to at most ``budget``: first fit, longest first.

    A longer sample gets a group of its own. Deterministic.
    """
    groups: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        for group, free in enumerate(room):
            if lengths[index] <= free:
                groups[group].append(index)
                room[group] -= lengths[index]
                break
        else:
            groups.append([index])
            room.append(max(budget - lengths[index], 0))
    return groups


def refuse_mixed_scores(samples: Sequence[Sample]) -> None:
    """TypeError unless all samples have the same kind of scores."""
    if len({type(sample.scores) for sample in samples}) > 1:
        raise TypeError("a batch mixes top-k and sampled-token scores")


def pack(samples: Sequence[Sample]) -> Packed:
    """Concatenates samples. All must have the same kind of scores (TypeError).

    LengthError for an empty prompt: nothing would predict the first response token.
    """
    ids, positions, rows = [], [], []
    start = 0
    for sample in samples:
        prompt, response = sample.rollout.prompt.token_ids, sample.rollout.response_ids
        if len(prompt) == 0:
            raise LengthError(f"sample {sample.rollout.uid}: the prompt has no tokens")
        length = len(prompt) + len(response)
        ids += [prompt, response]
        positions.append(np.arange(length))
        rows.append(np.arange(start + len(prompt) - 1, start + length - 1))
        start += length
    rollouts = [sample.rollout for sample in samples]
    refuse_mixed_scores(samples)
    scores = [sample.scores for sample in samples]
    topk = [score for score in scores if isinstance(score, TopK)]
    plain = [score.logprobs for score in scores if isinstance(score, SampledLogprobs)]
    sampled = [score.sampled_logprobs for score in topk] or plain
    return Packed(
        input_ids=_tensor(ids, np.int64)[None],
        position_ids=_tensor(positions, np.int64)[None],
        rows=_tensor(rows, np.int64),
        targets=_tensor([rollout.response_ids for rollout in rollouts], np.int64),
        rollout_logprobs=_tensor([rollout.rollout_logprobs for rollout in rollouts], np.float32),
        teacher_logprobs=_tensor(sampled, np.float32),
        teacher_ids=_tensor([score.ids for score in topk], np.int64) if topk else None,
        teacher_topk_logprobs=(
            _tensor([score.logprobs for score in topk], np.float32) if topk else None
        ),
    )


def _tensor(arrays: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))
