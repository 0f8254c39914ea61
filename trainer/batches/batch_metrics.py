"""Metrics of a step that depend on its samples alone, not on the student."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from async_opd.accounting.guardrail import GRAM
from async_opd.core.samples import EpisodeFacts, Header, Rollout

TurnCounts = Counter[tuple[str, bool]]
"""Numbers of response tokens by the name of their turn, and whether they are masked."""
SEPARATE_TURNS = 8
LATER_TURNS = f"after_{SEPARATE_TURNS}"
"""The first turns have separate metrics, and all later ones another."""
WEIGHTS = np.random.default_rng(0).integers(2**63, dtype=np.uint64, size=GRAM) * 2 + 1
"""Odd multipliers of a hash: two different 8-grams collide with a probability of about 2^-60."""


def repetition(rollout: Rollout) -> float:
    """Share of the response's 8-grams that occurred in it before: 0 for none, near 1 for a loop.

    No 8-gram spans tokens that the student did not sample. 0 for fewer than two 8-grams.
    """
    turns = [turn for turn in rollout.turns if len(turn) >= GRAM]
    if not turns:
        return 0.0
    grams = np.concatenate([np.lib.stride_tricks.sliding_window_view(one, GRAM) for one in turns])
    hashes = (grams.astype(np.uint64) * WEIGHTS).sum(axis=1, dtype=np.uint64)  # modulo 2^64
    return 1 - len(np.unique(hashes)) / len(hashes)


def masked_tokens(rollout: Rollout, oldest: int) -> NDArray[np.bool_]:
    """Which response tokens [R] were sampled under a version before ``oldest``."""
    masked = np.zeros(len(rollout.rollout_logprobs), np.bool_)
    for span in rollout.version_spans:
        masked[span.start : span.end] = span.version < oldest
    return masked


def masked_by_turn(rollouts: Iterable[Rollout], oldest: int) -> TurnCounts:
    """Counts of the response tokens of rollouts of several turns, which are numbered from 1."""
    counts = TurnCounts()
    for rollout in rollouts:
        turns = rollout.turns
        if len(turns) < 2:
            continue
        ends = np.cumsum([len(ids) for ids in turns[:-1]])
        for turn, masked in enumerate(np.split(masked_tokens(rollout, oldest), ends), 1):
            name = str(turn) if turn <= SEPARATE_TURNS else LATER_TURNS
            counts[name, True] += int(masked.sum())
            counts[name, False] += int((~masked).sum())
    return counts


def masked_shares(parts: Iterable[TurnCounts]) -> dict[str, float]:
    """Metrics: the share of masked tokens of each turn, of the counts of all ranks."""
    counts = sum(parts, TurnCounts())
    return {
        f"staleness/masked_tokens/turn_{name}": counts[name, True]
        / (counts[name, True] + counts[name, False])
        for name in sorted({name for name, _ in counts})
    }


def batch_metrics(headers: Sequence[Header], budget: int) -> dict[str, float]:
    """Tokens of the batch; shares of truncated and empty samples; values by source, of episodes.

    ``train/over_budget`` is the number of samples with more tokens than ``budget``.
    """
    count = max(len(headers), 1)
    lengths = [header.response_tokens for header in headers]
    return {
        "train/tokens": float(sum(header.tokens for header in headers)),
        "train/response_tokens": float(sum(lengths)),
        "train/mean_response_tokens": sum(lengths) / count,
        "train/std_response_tokens": float(np.std(lengths)) if lengths else 0.0,
        "train/truncated_share": sum(h.finish_reason == "length" for h in headers) / count,
        "train/empty_responses": float(lengths.count(0)),
        "train/over_budget": float(sum(header.tokens > budget for header in headers)),
        **_of_sources(headers),
        **_of_episodes([header.episode for header in headers if header.episode]),
    }


def _of_sources(headers: Sequence[Header]) -> dict[str, float]:
    """Means over the batch's samples of each data source; ``accuracy``: of their rewards."""
    by_source: defaultdict[str, list[Header]] = defaultdict(list)
    for header in headers:
        by_source[header.data_source].append(header)
    metrics: dict[str, float] = {}
    for source, own in by_source.items():
        prefix = f"source/{source}"
        metrics[f"{prefix}/mean_response_tokens"] = fmean(one.response_tokens for one in own)
        metrics[f"{prefix}/truncated_share"] = fmean(one.finish_reason == "length" for one in own)
        rewards = [one.reward for one in own if one.reward is not None]
        if rewards:
            metrics[f"{prefix}/accuracy"] = fmean(rewards)
    return metrics


def _of_episodes(episodes: Sequence[EpisodeFacts]) -> dict[str, float]:
    """Means over the batch's episodes; nothing where there is none."""
    names = [name for name in EpisodeFacts._fields if name != "end"] if episodes else []
    return {f"episode/{name}": fmean(getattr(one, name) for one in episodes) for name in names}
