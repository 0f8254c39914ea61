"""The messages of the pipeline: frozen, ragged, numpy; never padded, no Python object per token.

    Prompt ──rollouter──► Rollout ──scorer──► Sample(Rollout, Scores) ──► trainer

Shapes use T for a rollout's tokens, P for its prompt's, R for those that the student sampled (its
response), k for the teacher's top-k. Log-probabilities are natural logarithms (nats). Teacher
payloads cover sampled positions only; a teacher's log-probabilities are those of softmax(logits /
temperature) over the full vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

from async_opd.core.errors import LengthError, ScoreError
from async_opd.core.sequence import (
    PROMPT,
    STUDENT,
    Range,
    Span,
    check_spans,
    count,
    rows_of,
    sampled_of,
    spans_of,
)
from async_opd.core.uid import Uid

if TYPE_CHECKING:
    from async_opd.core.row import Row

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]
FinishReason = Literal["stop", "length"]
StateDtype = Literal["float32", "float16", "bfloat16"]

NO_VERSION = 2**31 - 1
"""A version newer than any."""
BFLOAT16_INFINITY = 0x7F80
"""Bits of a bfloat16 without its sign: infinity; above it are the NaNs."""


@dataclass(frozen=True)
class Prompt:
    """One entry of a data source, before sampling.

    ``uid`` is stable: the same entry in the same epoch has the same uid in every run.
    ``token_ids`` is int32 [P]. ``teacher`` is the name of the teacher the prompt is routed to.
    ``row`` is what a grader needs, where there is a reward; it travels to the grader, no further.
    ``teacher_ids`` int32 is the prompt that the teacher sees, where it is another one.
    """

    uid: Uid
    data_source: str
    teacher: str
    token_ids: Int32
    row: Row | None = None
    teacher_ids: Int32 | None = None

    @property
    def seen_by_teacher(self) -> Prompt:
        """The prompt as the teacher sees it."""
        return self if self.teacher_ids is None else replace(self, token_ids=self.teacher_ids)


@dataclass(frozen=True)
class Group:
    """Rollouts of one prompt to sample: ``members`` are their indices, all n or some to repeat."""

    prompt: Prompt
    members: tuple[int, ...]


@dataclass(frozen=True)
class VersionSpan:
    """Sampled tokens ``start <= i < end`` were sampled with weights of ``version``."""

    version: int
    start: int
    end: int


@dataclass(frozen=True)
class Rollout:
    """A sequence of T tokens, of which the student sampled R: its response.

    ``uid`` is ``<prompt uid>/<index in the group>``. ``continuation`` int32 [T - P] is everything
    after the prompt. ``spans`` partition ``0..T`` and say who wrote what: the prompt's span is the
    first, several may be the student's. ``rollout_logprobs`` float32 [R] are those of the
    distribution that was really sampled (after temperature and top-p). ``version_spans`` partition
    ``0..R`` in order. ``finish_reason`` is ``length`` if the response was cut off. ``topk_ids``
    int32 [R, k] are the student's own most probable tokens, distinct at each position, where the
    objective needs them; ``reward`` is the grader's number, where there is a grader. ``media`` are
    the content hashes of what the sequence shows besides its tokens, in order.

    LengthError for spans, versions and arrays that do not agree with each other.
    """

    uid: Uid
    prompt: Prompt
    continuation: Int32
    spans: tuple[Span, ...]
    rollout_logprobs: Float32
    version_spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    topk_ids: Int32 | None = None
    reward: float | None = None
    media: tuple[str, ...] = ()

    @classmethod
    def plain(
        cls,
        uid: Uid,
        prompt: Prompt,
        response_ids: Int32,
        rollout_logprobs: Float32,
        version_spans: tuple[VersionSpan, ...],
        finish_reason: FinishReason,
        topk_ids: Int32 | None = None,
    ) -> Self:
        """The simplest sequence: a prompt, and a response int32 [R] without interruption.

        The end-of-sequence token belongs to the response if it was sampled.
        """
        spans = spans_of([(PROMPT, len(prompt.token_ids)), (STUDENT, len(response_ids))])
        sampled = (rollout_logprobs, version_spans, finish_reason, topk_ids)
        return cls(uid, prompt, response_ids, spans, *sampled)

    @classmethod
    def answer(cls, uid: Uid, prompt: Prompt, ids: Sequence[int], finish: FinishReason) -> Self:
        """A plain one that is not trained: of version 0, and its log-probabilities are NaN."""
        logprobs = np.full(len(ids), np.nan, np.float32)
        versions = (VersionSpan(0, 0, len(ids)),) if len(ids) else ()
        return cls.plain(uid, prompt, np.asarray(ids, np.int32), logprobs, versions, finish)

    def __post_init__(self) -> None:
        check_spans(self.uid, self.spans, len(self.prompt.token_ids), self.tokens)
        length = count(self.positions)
        if self.rollout_logprobs.shape != (length,):
            raise LengthError(
                f"rollout {self.uid}: {length} response tokens but log-probabilities of shape "
                f"{self.rollout_logprobs.shape}"
            )
        if self.topk_ids is not None and len(self.topk_ids) != length:
            raise LengthError(
                f"rollout {self.uid}: {length} response tokens but a top-k of shape "
                f"{self.topk_ids.shape}"
            )
        ends = [0, *(span.end for span in self.version_spans)]
        starts = [*(span.start for span in self.version_spans), length]
        if ends != starts:
            raise LengthError(
                f"rollout {self.uid}: version spans {self.version_spans} do not partition "
                f"0..{length}"
            )

    @property
    def token_ids(self) -> Int32:
        """All tokens of the sequence, int32 [T]."""
        return np.concatenate([self.prompt.token_ids, self.continuation])

    @property
    def positions(self) -> tuple[Range, ...]:
        """The positions of the response in the sequence, R in all."""
        return sampled_of(self.spans)

    @property
    def rows(self) -> tuple[Range, ...]:
        """The rows of a model's output that predict the response, R in all."""
        return rows_of(self.spans)

    @property
    def turns(self) -> list[Int32]:
        """The tokens of each span that the student sampled, views of the continuation."""
        first = len(self.prompt.token_ids)
        return [self.continuation[start - first : end - first] for start, end in self.positions]

    @property
    def response_ids(self) -> Int32:
        """The tokens that the student sampled, int32 [R]; a view where they are one span."""
        turns = self.turns
        return turns[0] if len(turns) == 1 else np.concatenate([self.continuation[:0], *turns])

    @property
    def seen_by_teacher(self) -> Rollout:
        """The same tokens after the prompt that the teacher sees."""
        prompt = self.prompt.seen_by_teacher
        if prompt is self.prompt:
            return self
        old = len(self.prompt.token_ids)
        lengths = [(span.origin, span.end - span.start) for span in self.spans if span.start >= old]
        spans = spans_of([(PROMPT, len(prompt.token_ids)), *lengths])
        return replace(self, prompt=prompt, spans=spans)

    @property
    def without_teacher_inputs(self) -> Rollout:
        """Without what only the teacher needed: it travels no further."""
        return replace(self, topk_ids=None, prompt=replace(self.prompt, teacher_ids=None))

    @property
    def oldest_version(self) -> int:
        """The oldest weight version that produced one of the tokens.

        ``NO_VERSION`` for an empty response: it has no token that could be old.
        """
        return min((span.version for span in self.version_spans), default=NO_VERSION)

    @property
    def tokens(self) -> int:
        """T: what a teacher or the trainer has to process."""
        return len(self.prompt.token_ids) + len(self.continuation)


@dataclass(frozen=True)
class SampledLogprobs:
    """The teacher's log-probability of each sampled token: float32 [R]."""

    logprobs: Float32


@dataclass(frozen=True)
class TopK:
    """The teacher's k most probable tokens at each response position, and the sampled one.

    ``ids`` int32 [R, k], distinct at each position, and ``logprobs`` float32 [R, k], both by
    falling probability; ``sampled_logprobs`` float32 [R]. ``rest_logprobs`` float32 [R] is the
    logarithm of the mass of all other tokens; None where a teacher cannot tell it (servers).
    """

    ids: Int32
    logprobs: Float32
    sampled_logprobs: Float32
    rest_logprobs: Float32 | None = None


@dataclass(frozen=True)
class CandidateLogprobs:
    """The teacher's log-probabilities of given tokens: the student's own top-k.

    ``ids`` int32 [R, k], distinct at each position, ``logprobs`` float32 [R, k],
    ``sampled_logprobs`` and ``rest_logprobs`` float32 [R], as in ``TopK``.
    """

    ids: Int32
    logprobs: Float32
    sampled_logprobs: Float32
    rest_logprobs: Float32 | None = None


@dataclass(frozen=True)
class HiddenStates:
    """The teacher's final hidden states (after its last norm) that predict the response tokens.

    ``states`` [R, H] is float32 or float16, or uint16 with the bits of bfloat16, as ``dtype`` says.
    They know no temperature: that is the head's affair, in the trainer.
    """

    states: NDArray[np.float32] | NDArray[np.float16] | NDArray[np.uint16]
    dtype: StateDtype


Scores = SampledLogprobs | TopK | CandidateLogprobs | HiddenStates


@dataclass(frozen=True)
class Sample:
    """A rollout with its teacher's scores: what the trainer eats.

    LengthError for scores of another length than the response, ScoreError for NaN, for +inf, and
    for hidden states that are not finite. A log-probability of -inf is one: the teacher excludes
    the token, and what that means is the objective's affair.
    """

    rollout: Rollout
    scores: Scores

    @property
    def header(self) -> Header:
        """What is known of it without looking inside; ``nbytes`` are those of its arrays."""
        one = self.rollout
        return Header(one.uid, one.tokens, self.nbytes, one.oldest_version, one.prompt.teacher)

    @property
    def nbytes(self) -> int:
        """Bytes of all its arrays."""
        rollout = self.rollout
        own = (rollout.prompt, rollout, self.scores)
        arrays = (value for part in own for value in vars(part).values())
        return sum(array.nbytes for array in arrays if isinstance(array, np.ndarray))

    def __post_init__(self) -> None:
        length = len(self.rollout.rollout_logprobs)
        arrays = {k: v for k, v in vars(self.scores).items() if isinstance(v, np.ndarray)}
        if any(len(array) != length for array in arrays.values()):
            shapes = {name: array.shape for name, array in arrays.items()}
            raise LengthError(
                f"sample {self.rollout.uid}: {length} response tokens but scores of shapes {shapes}"
            )
        wrong = sorted(name for name, array in arrays.items() if not _sound(name, array))
        if wrong:
            raise ScoreError(
                f"sample {self.rollout.uid} of teacher {self.rollout.prompt.teacher}: NaN or "
                f"infinity in its {', '.join(wrong)}"
            )


def _sound(name: str, array: NDArray[Any]) -> bool:
    """No NaN and no infinity that the array may not have. Large ones are not copied but once."""
    if not array.size or array.dtype == np.int32:
        return True
    if array.dtype == np.uint16:
        return int((array & 0x7FFF).max()) < BFLOAT16_INFINITY
    if name == "states":
        return bool(np.isfinite(array).all())
    return bool(array.max() < np.inf)  # a maximum carries NaN along


@dataclass(frozen=True)
class Header:
    """What the control plane knows of a queued item without touching its payload."""

    uid: Uid
    tokens: int
    nbytes: int
    oldest_version: int
    teacher: str

    def staleness(self, version: int) -> int:
        """Weight versions between the oldest token and the trainer's ``version``."""
        return max(0, version - self.oldest_version)


@dataclass(frozen=True)
class DeadLetter:
    """A rollout that will never be trained, why, and which ``stage`` gave it up.

    A prompt that cannot be sampled at all comes with its own uid, and stands for its rollouts.
    """

    header: Header
    reason: str
    stage: str = "teacher"

    @classmethod
    def of_prompt(cls, prompt: Prompt, uid: Uid, stage: str, reason: str) -> DeadLetter:
        """A rollout that was never had, of this prompt."""
        header = Header(uid, len(prompt.token_ids), 0, NO_VERSION, prompt.teacher)
        return cls(header, reason, stage)
