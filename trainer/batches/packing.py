"""Packs ragged samples into micro-batches: one row of tokens each, no padding, a token budget.

    samples ──first fit, longest first──► groups ──► Packed(input_ids [1, T], rows [N], tokens [N])

Every sample is a sequence of the row, or several: one for each segment. Position ids restart with
each. Given these and no attention mask, transformers keeps packed
samples from attending to each other (a test compares packed logits with each sample's own); kernels
for ragged rows take ``starts`` and ``longest`` instead (``student/attention.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import groupby
from typing import Any, Self

import numpy as np
import torch

from async_opd.core.errors import StageError
from async_opd.core.samples import Rollout, Sample
from async_opd.core.scores import HiddenStates, SampledLogprobs, SupportScores
from async_opd.core.sequence import Float32, indices
from trainer.batches.batch_metrics import LATER_TURNS, SEPARATE_TURNS, masked_tokens
from trainer.batches.token_weights import TokenWeight
from trainer.losses.base import Change, TeacherStates, Tokens
from trainer.vision.images import RowImages

MIN_REST_MASS = 1e-5
"""Least estimate of the mass outside of a support."""
Owner = tuple[str, str, str]
"""Teacher, data source and, of an episode, turn: what response tokens have separate metrics by."""


def estimate_log_rest(logprobs: Float32) -> Float32:
    """log(1 - P) [R] of a support's log-probabilities [R, k], nats: servers do not send it.

    P = Σ_i p_i over the k tokens, in float64; the result is at least log ``MIN_REST_MASS``. Each
    p_i comes from a float32 logarithm, rounded once by the server and once in transport: P, and so
    1 - P, has an error of about 1e-6. At ``MIN_REST_MASS`` the logarithm is off by at most 0.1
    nats, at a mass of 1e-3 by 0.001. A smaller mass counts as ``MIN_REST_MASS``: its true logarithm
    is lower by log(MIN_REST_MASS / mass), so that reverse KL is too small by at most the student's
    own mass outside of the support times that. The estimate is never rounding noise alone.
    """
    mass = np.exp(logprobs, dtype=np.float64).sum(axis=1)
    return np.asarray(np.log1p(-np.minimum(mass, 1 - MIN_REST_MASS)), dtype=np.float32)


@dataclass(frozen=True)
class Row:
    """Sequences one after the other, T tokens in all: input ids and position ids [1, T].

    ``starts`` int32 [n + 1] are the first token of each sequence, and T; ``longest`` is the number
    of tokens of the longest one. ``images`` are those of a row of a VLM student.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    starts: torch.Tensor
    longest: int
    images: RowImages | None = field(default=None, kw_only=True)

    @classmethod
    def of(cls, ids: Sequence[np.ndarray], positions: Sequence[np.ndarray]) -> Row:
        """The row of these sequences, with the positions of their tokens."""
        lengths = [len(one) for one in ids]
        starts = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32))
        return cls(
            _tensor(ids, np.int64)[None],
            _tensor(positions, np.int64)[None],
            starts,
            max(lengths, default=0),
        )

    def to(self, device: torch.device) -> Self:
        """The same on another device: from pinned memory the caller waits for no copy."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> Self:
        """The same in pinned host memory."""
        return self._map(torch.Tensor.pin_memory)

    def _map(self, change: Change) -> Self:
        changed: dict[str, Any] = {}
        for name in (f.name for f in fields(self)):
            value = getattr(self, name)
            if isinstance(value, torch.Tensor):
                changed[name] = change(value)
            elif isinstance(value, RowImages | Tokens):
                changed[name] = value.map(change)
        return replace(self, **changed)


@dataclass(frozen=True)
class Packed(Row):
    """One micro-batch: a row of all samples, of which the student sampled N tokens, in order.

    ``rows`` [N] are the positions whose logits predict the response ``tokens``. ``experts``
    [T, layers, k] are those that a mixture's engine chose, and -1 for the last token of a sample,
    which it did not compute; None if the engine returned none. ``owners`` are those that
    ``tokens.owners`` point to.
    """

    rows: torch.Tensor
    tokens: Tokens
    experts: torch.Tensor | None = None
    owners: tuple[Owner, ...] = ()


def group_by_budget(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Groups of indices whose lengths sum to at most ``budget``: first fit, longest first.

    A sample longer than the budget is a separate group. Deterministic.
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


def refuse_mixed_scores(kinds: Iterable[str]) -> None:
    """TypeError for the names of several kinds of scores."""
    kinds = sorted(set(kinds))
    if len(kinds) > 1:
        raise TypeError(f"a batch mixes scores of several kinds: {', '.join(kinds)}")


@dataclass(frozen=True)
class Vocabularies:
    """Rows of the student's head; ``common``: rows it shares with each teacher's head, by name."""

    student: int
    common: Mapping[str, int] = field(default_factory=dict)


def refuse_foreign_tokens(samples: Sequence[Sample], vocabularies: Vocabularies) -> None:
    """StageError for a token, sampled or in a support, without a row in every head it needs."""
    for sample in samples:
        scores, teacher = sample.scores, sample.rollout.prompt.teacher
        rows = vocabularies.common.get(teacher, vocabularies.student)
        supports = [scores.ids] if isinstance(scores, SupportScores) else []
        for ids in (sample.rollout.response_ids, *supports):
            wrong = ids[(ids < 0) | (ids >= rows)]
            if wrong.size:
                raise StageError(
                    "trainer",
                    f"sample {sample.rollout.uid} of teacher {teacher} has token {int(wrong[0])}; "
                    f"the head has {rows} rows (the student's own: {vocabularies.student})",
                    "teacher and student must have the same tokenizer, and neither may produce "
                    "tokens from the padding of its vocabulary",
                )


def pack(
    samples: Sequence[Sample],
    token_weights: Sequence[TokenWeight] | None = None,
    version: int | None = None,
    oldest: int = 0,
) -> Packed:
    """Concatenates samples; without ``token_weights``, every token weighs 1 and there is no reward.

    Responses that were sampled under ``version`` alone are fresh; for None, no response is. Tokens
    of versions before ``oldest`` are masked. TypeError unless all have the same kind of scores.
    """
    ids, positions, rows = [], [], []
    start = 0
    for sample in samples:
        rollout = sample.rollout
        tokens, segments = rollout.token_ids, rollout.segments
        ids += [tokens[first:last] for first, last in segments]
        positions += [np.arange(last - first) for first, last in segments]
        rows.append(start + indices(rollout.rows))
        start += rollout.tokens
    refuse_mixed_scores(type(sample.scores).__name__ for sample in samples)
    sampled = _tokens(samples, token_weights or [TokenWeight()] * len(samples), version)
    if oldest:
        masked = torch.from_numpy(
            np.concatenate([masked_tokens(sample.rollout, oldest) for sample in samples])
        )
        sampled = replace(sampled, weights=sampled.weights.masked_fill(masked, 0.0), masked=masked)
    return Packed(
        **vars(Row.of(ids, positions)),
        rows=_tensor(rows, np.int64),
        tokens=replace(sampled, **_scores(samples)),
        experts=_experts(samples),
        owners=tuple(dict.fromkeys(owner for s in samples for owner, _ in _owners(s.rollout))),
    )


def _owners(rollout: Rollout) -> list[tuple[Owner, int]]:
    """The owners of its response tokens, in order, each with a number of them."""
    pair = rollout.prompt.teacher, rollout.prompt.data_source
    if rollout.episode is None:
        return [((*pair, ""), len(rollout.rollout_logprobs))]
    turns = (str(turn) for turn in range(1, SEPARATE_TURNS + 1))
    lengths = (end - start for start, end in rollout.positions)
    return [((*pair, next(turns, LATER_TURNS)), length) for length in lengths]


def _experts(samples: Sequence[Sample]) -> torch.Tensor | None:
    found = [sample.rollout.routed_experts for sample in samples]
    some = [experts for experts in found if experts is not None]
    if not some or len(some) < len(found):
        return None
    last = np.full((1, *some[0].shape[1:]), -1)
    return _tensor([part for experts in some for part in (experts, last)], np.int64)


def _tokens(
    samples: Sequence[Sample], token_weights: Sequence[TokenWeight], version: int | None
) -> Tokens:
    """The fields of Tokens that do not depend on the scores."""
    rollouts = [sample.rollout for sample in samples]
    lengths = [len(rollout.response_ids) for rollout in rollouts]
    owned = [one for rollout in rollouts for one in _owners(rollout)]
    indices_of = {owner: at for at, owner in enumerate(dict.fromkeys(one for one, _ in owned))}
    owners = np.asarray([indices_of[owner] for owner, _ in owned], np.int32)
    fresh = [{span.version for span in one.version_spans} == {version} for one in rollouts]
    advantages, reward_weights = None, None
    if all(one.advantage is not None for one in token_weights):
        advantages = _repeated([one.advantage or 0.0 for one in token_weights], lengths)
        reward_weights = _repeated([one.reward_weight for one in token_weights], lengths)
    return Tokens(
        targets=_tensor([rollout.response_ids for rollout in rollouts], np.int64),
        rollout_logprobs=_tensor([rollout.rollout_logprobs for rollout in rollouts], np.float32),
        weights=_repeated([one.weight for one in token_weights], lengths),
        advantages=advantages,
        reward_weights=reward_weights,
        response_starts=torch.from_numpy(np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)),
        owners=torch.from_numpy(np.repeat(owners, [number for _, number in owned])),
        fresh=torch.from_numpy(np.repeat(np.asarray(fresh, dtype=bool), lengths)),
    )


def _scores(samples: Sequence[Sample]) -> dict[str, Any]:
    """The fields of Tokens that the scores determine; all samples have the same kind."""
    scores = [sample.scores for sample in samples]
    if plain := [score for score in scores if isinstance(score, SampledLogprobs)]:
        return {"teacher_logprobs": _tensor([score.logprobs for score in plain], np.float32)}
    if topk := [score for score in scores if isinstance(score, SupportScores)]:
        return {
            "teacher_logprobs": _tensor([score.sampled_logprobs for score in topk], np.float32),
            "teacher_ids": _tensor([score.ids for score in topk], np.int64),
            "teacher_topk_logprobs": _tensor([score.logprobs for score in topk], np.float32),
            "teacher_rest_logprobs": _tensor([_rest(score) for score in topk], np.float32),
        }
    return {"teacher_states": _states(samples)}


def _rest(scores: SupportScores) -> Float32:
    """log mass outside of the support: the teacher's, or an estimate where it sent none."""
    sent = scores.rest_logprobs
    return estimate_log_rest(scores.logprobs) if sent is None else sent


def _states(samples: Sequence[Sample]) -> tuple[TeacherStates, ...]:
    """Hidden states, one tensor for each run of consecutive samples of one teacher."""
    runs, start = [], 0
    for teacher, run in groupby(samples, key=lambda sample: sample.rollout.prompt.teacher):
        parts = [_tensor_of(s.scores) for s in run if isinstance(s.scores, HiddenStates)]
        # Without the empty parts: those may have another width or dtype.
        states = torch.cat([part for part in parts if len(part)] or parts[:1])
        runs.append(TeacherStates(teacher, start, states))
        start += len(states)
    return tuple(runs)


def _tensor_of(scores: HiddenStates) -> torch.Tensor:
    tensor = torch.from_numpy(np.array(scores.states))
    return tensor.view(torch.bfloat16) if scores.dtype == "bfloat16" else tensor


def _repeated(values: Sequence[float], lengths: Sequence[int]) -> torch.Tensor:
    """Each sample's value for all its tokens, [N] float64: weights of large batches are tiny."""
    return torch.from_numpy(np.repeat(np.asarray(values, dtype=np.float64), lengths))


def _tensor(arrays: Sequence[np.ndarray], dtype: type) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(arrays).astype(dtype))
