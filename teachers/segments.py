"""A rollout's segments, each scored as a sequence by itself, by one request.

    for_teacher ──cut──► segment 0, segment 1, … ──one after the other──► Scores of each ──► joined

They go one after the other: what two segments have in common is in the prefix cache for the second.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

import numpy as np

from async_opd.core.errors import RolloutFault
from async_opd.core.samples import Rollout, VersionSpan
from async_opd.core.scores import Scores
from async_opd.core.sequence import PROMPT, Range, count, spans_of


async def score_segments(
    teacher: str, rollout: Rollout, score: Callable[[Rollout], Awaitable[Scores]]
) -> Scores:
    """The scores of a rollout, whose segments ``score`` takes as the teacher reads them, in order.

    RolloutFault, by ``teacher``, for images after the prompt's own.
    """
    seen = rollout.for_teacher
    if seen.media:
        cause = f"rollout {rollout.uid} has {len(seen.media)} images after its prompt"
        remedy = "let no tool answer with images: teachers read those of prompts only"
        raise RolloutFault(teacher, cause, remedy)
    return joined([await score(one) for one in by_segment(seen)])


def by_segment(rollout: Rollout) -> list[Rollout]:
    """A rollout for each segment; the rollout itself where it has one.

    Without ``routed_experts``. The prompt's images are those of the first segment.
    """
    segments = rollout.segments
    return [rollout] if len(segments) == 1 else [_segment(rollout, one) for one in segments]


def _segment(rollout: Rollout, segment: Range) -> Rollout:
    start, end = segment
    parts = [(one.origin, one.end - one.start) for one in rollout.spans if start <= one.start < end]
    prompt = parts[0][1] if parts[0][0] == PROMPT else 0
    first, last = count(rollout.positions, start), count(rollout.positions, end)
    own, then = np.split(rollout.token_ids[start:end], [prompt])
    versions = [
        VersionSpan(one.version, max(one.start, first) - first, min(one.end, last) - first)
        for one in rollout.version_spans
    ]
    topk = rollout.topk_ids
    media = () if start else rollout.prompt.media
    return replace(
        rollout,
        prompt=replace(rollout.prompt, token_ids=own, teacher_ids=None, media=media),
        continuation=then,
        spans=spans_of(parts),
        rollout_logprobs=rollout.rollout_logprobs[first:last],
        version_spans=tuple(one for one in versions if one.start < one.end),
        topk_ids=None if topk is None else topk[first:last],
        routed_experts=None,
    )


def joined(parts: Sequence[Scores]) -> Scores:
    """The scores of consecutive parts of a response; all of one kind, at least one."""
    names = [name for name, value in vars(parts[0]).items() if isinstance(value, np.ndarray)]
    if len(parts) == 1:
        return parts[0]
    return replace(parts[0], **{n: np.concatenate([vars(one)[n] for one in parts]) for n in names})
