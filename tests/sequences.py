"""Rollouts of several spans for property tests: prompts, student, tools and users in any order."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from async_opd.core.row import Media
from async_opd.core.samples import EpisodeFacts, Prompt, Rollout, TeacherView, VersionSpan
from async_opd.core.sequence import PROMPT, STUDENT, spans_of

ORIGINS = [STUDENT, STUDENT, "tool", "user"]
SEGMENTS = [*ORIGINS, PROMPT]
Parts = list[tuple[str, int]]


def parts(
    most: int = 6, longest: int = 4, origins: list[str] = SEGMENTS
) -> st.SearchStrategy[Parts]:
    """Origins and numbers of tokens of what follows the prompt; another one begins a segment."""
    one = st.tuples(st.sampled_from(origins), st.integers(0, longest))
    return st.lists(one, max_size=most)


@st.composite
def views(draw: st.DrawFn, rollout: Rollout) -> TeacherView:
    """A teacher's view of the rollout with any context around its sampled tokens."""
    made: list[tuple[str, Any]] = [(PROMPT, np.zeros(draw(st.integers(1, 4)), np.int32))]
    for turn in (*rollout.turns, None):
        context = draw(parts(2, origins=["tool", PROMPT]))
        made += [(origin, np.full(length, -1, np.int32)) for origin, length in context]
        made += [] if turn is None else [(STUDENT, turn)]
    ids = np.concatenate([one for _, one in made])
    return TeacherView(ids, spans_of((origin, len(one)) for origin, one in made))


def sequence(
    uid: str,
    after: Parts,
    *,
    prompt: int = 3,
    vocabulary: int = 32,
    top_k: int = 0,
    seed: int = 0,
    teacher: str = "t",
    teacher_ids: bool = False,
    media: bool = True,
) -> Rollout:
    """A rollout of these parts with random tokens, log-probabilities, versions and ``media``."""
    rng = np.random.default_rng(seed)
    spans = spans_of([(PROMPT, prompt), *after])
    total, sampled = spans[-1].end, sum(length for origin, length in after if origin == STUDENT)
    ids = rng.integers(0, vocabulary, total).astype(np.int32)
    best = rng.random((sampled, vocabulary)).argsort(-1)[:, :top_k].astype(np.int32)
    other = rng.integers(0, vocabulary, prompt + 2).astype(np.int32) if teacher_ids else None
    cut = int(rng.integers(0, sampled + 1))
    episode = EpisodeFacts(seed, calls=1, tool_s=0.5, end="turns") if seed % 2 else None
    images = _media(seed + 1, seed % 2 * media)
    versions = (VersionSpan(2, 0, cut), VersionSpan(3, cut, sampled))
    return Rollout(
        uid=uid,
        prompt=Prompt(uid.rpartition("/")[0], "s", teacher, ids[:prompt], None, other, images),
        continuation=ids[prompt:],
        spans=spans,
        rollout_logprobs=-rng.random(sampled).astype(np.float32),
        version_spans=tuple(span for span in versions if span.start < span.end),
        finish_reason="stop",
        topk_ids=best if top_k else None,
        media=_media(seed, seed % 3 * media),
        episode=episode,
    )


def _media(seed: int, count: int) -> tuple[Media, ...]:
    return tuple(Media(f"{seed:02x}{index:062x}", 70, 8, 4) for index in range(count))


def sampled_positions(rollout: Rollout) -> list[int]:
    """Where the student's tokens are, counted one token at a time."""
    found, at = [], 0
    for span in rollout.spans:
        for _ in range(span.end - span.start):
            if span.origin == STUDENT:
                found.append(at)
            at += 1
    return found


def same(one: Any, other: Any) -> bool:
    """Whether all fields are the same, arrays in type and content."""
    for name, value in vars(one).items():
        found = getattr(other, name)
        if isinstance(value, np.ndarray):
            if value.dtype != found.dtype or not np.array_equal(value, found):
                return False
        elif hasattr(value, "__dataclass_fields__"):
            if not same(value, found):
                return False
        elif value != found or type(value) is not type(found):
            return False
    return True
