"""The messages of the pipeline: frozen, ragged numpy arrays, never padded, no object per token.

    Prompt ──rollouter──► Rollout ──scorer──► Sample(Rollout, Scores) ──► trainer

Shapes use T for a rollout's tokens, P for its prompt's, R for those that the student sampled (its
response), k for the teacher's top-k. Log-probabilities are natural logarithms (nats).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from async_opd.core.errors import LengthError, RolloutFault, ScoreError
from async_opd.core.row import Media
from async_opd.core.scores import Scores, sound
from async_opd.core.sequence import (
    PROMPT,
    STUDENT,
    Float32,
    Int32,
    Range,
    Span,
    check_spans,
    count,
    indices,
    rows_of,
    sampled_of,
    segments_of,
    spans_of,
)
from async_opd.core.uid import Uid

if TYPE_CHECKING:
    from async_opd.core.row import Row

FinishReason = Literal["stop", "length"]
EpisodeEnd = Literal["done", "turns", "tokens", "context", "bad_call", "fault"]
Experts = NDArray[np.uint8] | NDArray[np.uint16]

NO_VERSION = 2**31 - 1
"""A number above every weight version."""
NO_TEACHER = ""
"""The teacher of a row that cannot be read, or that belongs to none."""


@dataclass(frozen=True)
class Prompt:
    """One entry of a data source, before sampling.

    ``uid`` is stable: the same entry in the same epoch has the same uid in every run.
    ``token_ids`` is int32 [P]. ``teacher`` is the name of the teacher that scores its rollouts.
    ``row`` is the source's entry for a grader, where there is a reward; a graded rollout has none.
    ``teacher_ids`` int32 are the prompt's tokens for the teacher, if they differ. ``media`` are its
    images, in order. ``encoded`` are their bytes by ``sha256``, where the prompt was made: a
    pickled prompt has none.

    Before a rollout ``token_ids`` has one placeholder an image. A rollout's prompt has the tokens
    of each image in place of it, and its ``teacher_ids`` still one.
    """

    uid: Uid
    data_source: str
    teacher: str
    token_ids: Int32
    row: Row | None = None
    teacher_ids: Int32 | None = None
    media: tuple[Media, ...] = ()
    encoded: dict[str, bytes] = field(default_factory=dict, repr=False, compare=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "encoded": {}}

    @property
    def for_teacher(self) -> Prompt:
        """The prompt with the tokens that the teacher reads."""
        return self if self.teacher_ids is None else replace(self, token_ids=self.teacher_ids)


@dataclass(frozen=True)
class Group:
    """Rollouts to sample of one prompt: ``members`` are their indices, all n or some resampled."""

    prompt: Prompt
    members: tuple[int, ...]


@dataclass(frozen=True)
class VersionSpan:
    """Response tokens ``start <= i < end`` were sampled under weights of ``version``."""

    version: int
    start: int
    end: int


class EpisodeFacts(NamedTuple):
    """The facts of an episode of ``turns`` sampled turns, and why it came to its ``end``.

    Numbers of tool calls: ``calls`` that could be read, ``malformed`` ones that could not, and
    ``unknown`` ones of tools that do not exist or take other arguments. ``tool_s`` are seconds in
    the environment's own code, ``cut_tokens`` those that its messages were too long by. ``end`` is
    ``done`` by the environment, the bound of the episode that was reached, or ``fault``: it could
    not be played.
    """

    turns: int
    calls: int = 0
    malformed: int = 0
    unknown: int = 0
    tool_s: float = 0.0
    cut_tokens: int = 0
    end: EpisodeEnd = "done"


@dataclass(frozen=True)
class TeacherView:
    """An episode as its teacher reads it: T' tokens int32, and ``spans``, which partition them.

    The teacher's own context lies around the sampled tokens, which are the rollout's in their
    order: the n-th span of the student is as long as the rollout's n-th. Segments may differ.
    """

    token_ids: Int32
    spans: tuple[Span, ...]

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the first segment's prompt."""
        return self.spans[0].end if self.spans and self.spans[0].origin == PROMPT else 0

    def pairs(self, rollout: Rollout) -> tuple[tuple[Range, Range], ...]:
        """Each span that the student sampled, and where the view has it.

        LengthError unless they are as many and as long, with the rollout's tokens.
        """
        check_spans(rollout.uid, self.spans, self.prompt_tokens, len(self.token_ids))
        own, seen = rollout.positions, sampled_of(self.spans)
        if [end - start for start, end in own] != [end - start for start, end in seen]:
            cause = f"sampled tokens at {own}, but a teacher's view of them at {seen}"
            raise LengthError(f"rollout {rollout.uid}: {cause}")
        if not np.array_equal(self.token_ids[indices(seen)], rollout.response_ids):
            raise LengthError(f"rollout {rollout.uid}: its teacher's view has other sampled tokens")
        return tuple(zip(own, seen, strict=True))


def _by_version(spans: Sequence[VersionSpan]) -> tuple[tuple[int, int], ...]:
    """See ``Header.versions``."""
    tokens = Counter[int]()
    for span in spans:
        tokens[span.version] += span.end - span.start
    return tuple(sorted(tokens.items())) if len(tokens) > 1 else ()


@dataclass(frozen=True)
class Rollout:
    """A sequence of T tokens, of which the student sampled R: its response.

    ``uid`` is ``<prompt uid>/<index in the group>``. ``continuation`` int32 [T - P] are all tokens
    after the prompt. ``spans`` partition ``0..T`` and name the origin of each token: the prompt's
    span is the first, several may be the student's. Each later span of origin ``prompt`` begins
    another segment (``core/sequence.py``). ``rollout_logprobs`` float32 [R] are those of
    the distribution that was sampled (after temperature and top-p). ``version_spans`` partition
    ``0..R`` in order. ``finish_reason`` is ``length`` if the response was truncated. ``topk_ids``
    int32 [R, k] are the student's own most probable tokens, distinct at each position, where the
    objective needs them; ``reward`` is the grader's, where there is a grader. ``media`` are the
    images after the prompt's own, in order. ``routed_experts`` [T - 1, layers, k] are those that a
    mixture's engine chose for all tokens but the last; a rollout of several segments has none.
    ``episode`` has the facts of an episode with an environment. ``view`` is the sequence that the
    teacher reads, where more than the prompt differs. ``fault``: why the prompt has no answer; of
    evaluations and teachers' own answers only, since a rollout for training is dead-lettered.

    LengthError for spans, versions, arrays and a view whose lengths disagree.
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
    media: tuple[Media, ...] = ()
    routed_experts: Experts | None = None
    episode: EpisodeFacts | None = None
    view: TeacherView | None = None
    fault: RolloutFault | None = None

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
        """The simplest sequence: a prompt, and a response int32 [R] in one span.

        The end-of-sequence token belongs to the response if it was sampled.
        """
        spans = spans_of([(PROMPT, len(prompt.token_ids)), (STUDENT, len(response_ids))])
        sampled = (rollout_logprobs, version_spans, finish_reason, topk_ids)
        return cls(uid, prompt, response_ids, spans, *sampled)

    @classmethod
    def answer(cls, uid: Uid, prompt: Prompt, ids: Sequence[int], finish: FinishReason) -> Self:
        """A plain rollout that is not trained: of version 0, with NaN as log-probabilities."""
        logprobs = np.full(len(ids), np.nan, np.float32)
        versions = (VersionSpan(0, 0, len(ids)),) if len(ids) else ()
        return cls.plain(uid, prompt, np.asarray(ids, np.int32), logprobs, versions, finish)

    @classmethod
    def unanswered(cls, uid: Uid, prompt: Prompt, fault: RolloutFault) -> Self:
        """Stands for the answer of an episode that could not be played. It has no tokens."""
        empty = cls.answer(uid, prompt, (), "stop")
        return replace(empty, episode=EpisodeFacts(turns=0, end="fault"), fault=fault)

    def __post_init__(self) -> None:
        check_spans(self.uid, self.spans, len(self.prompt.token_ids), self.tokens)
        length = count(self.positions)
        seen = f"rollout {self.uid}: {length} response tokens but"
        if self.rollout_logprobs.shape != (length,):
            raise LengthError(f"{seen} log-probabilities of shape {self.rollout_logprobs.shape}")
        if self.topk_ids is not None and len(self.topk_ids) != length:
            raise LengthError(f"{seen} a top-k of shape {self.topk_ids.shape}")
        if self.routed_experts is not None and len(self.routed_experts) != self.tokens - 1:
            shape = self.routed_experts.shape
            raise LengthError(f"rollout {self.uid}: {self.tokens} tokens, experts {shape}")
        ends = [0, *(span.end for span in self.version_spans)]
        starts = [*(span.start for span in self.version_spans), length]
        if ends != starts:
            raise LengthError(
                f"rollout {self.uid}: version spans {self.version_spans} do not partition "
                f"0..{length}"
            )
        if self.view is not None:
            self.view.pairs(self)

    @property
    def token_ids(self) -> Int32:
        """All tokens of the sequence, int32 [T]."""
        return np.concatenate([self.prompt.token_ids, self.continuation])

    @property
    def positions(self) -> tuple[Range, ...]:
        """The positions of the response's R tokens in the sequence."""
        return sampled_of(self.spans)

    @property
    def segments(self) -> tuple[Range, ...]:
        """The positions of each segment."""
        return segments_of(self.spans)

    @property
    def rows(self) -> tuple[Range, ...]:
        """The R rows of a model's output that predict the response."""
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
    def for_teacher(self) -> Rollout:
        """The rollout as its teacher reads it: by the view, or after the teacher's prompt."""
        prompt, view = self.prompt.for_teacher, self.view
        if view is None:
            return self if prompt is self.prompt else self.after(prompt)
        own, then = np.split(view.token_ids, [view.prompt_tokens])
        prompt = replace(prompt, token_ids=own, teacher_ids=None)
        changed = replace(self, prompt=prompt, continuation=then, spans=view.spans, view=None)
        return replace(changed, routed_experts=None)

    def after(self, prompt: Prompt) -> Rollout:
        """The rollout with the same tokens after another prompt."""
        old = len(self.prompt.token_ids)
        lengths = [(span.origin, span.end - span.start) for span in self.spans if span.start >= old]
        spans = spans_of([(PROMPT, len(prompt.token_ids)), *lengths])
        return replace(self, prompt=prompt, spans=spans, routed_experts=None)

    @property
    def without_teacher_inputs(self) -> Rollout:
        """The rollout without ``topk_ids``, ``teacher_ids`` and ``view``: for teachers alone."""
        prompt = replace(self.prompt, teacher_ids=None)
        return replace(self, topk_ids=None, view=None, prompt=prompt)

    @property
    def without_row(self) -> Rollout:
        """The rollout without its prompt's row, which no stage after the grader needs."""
        if self.prompt.row is None:
            return self
        return replace(self, prompt=replace(self.prompt, row=None))

    @property
    def oldest_version(self) -> int:
        """The oldest weight version that a token of the response was sampled under.

        ``NO_VERSION`` for an empty response, which is never stale.
        """
        return min((span.version for span in self.version_spans), default=NO_VERSION)

    @property
    def tokens(self) -> int:
        """T, the tokens that a teacher or the trainer computes."""
        return len(self.prompt.token_ids) + len(self.continuation)

    def header(self, nbytes: int) -> Header:
        """The header of the rollout, whose payload has ``nbytes``."""
        segments = self.segments
        return Header(
            self.uid,
            self.tokens,
            nbytes,
            self.oldest_version,
            self.prompt.teacher,
            len(self.rollout_logprobs),
            self.finish_reason,
            self.reward,
            self.prompt.data_source,
            images=tuple((one.width, one.height) for one in (*self.prompt.media, *self.media)),
            episode=self.episode,
            segments=tuple(end - start for start, end in segments) if len(segments) > 1 else (),
            versions=_by_version(self.version_spans),
        )


@dataclass(frozen=True)
class Sample:
    """A rollout with its teacher's scores, the input of the trainer.

    LengthError for scores of another length than the response, ScoreError for NaN, for +inf, and
    for hidden states that are not finite. A log-probability of -inf is allowed: the teacher
    excludes the token, and each objective defines its loss for that.
    """

    rollout: Rollout
    scores: Scores

    @property
    def header(self) -> Header:
        """The header of the sample; its ``nbytes`` are those of the arrays."""
        return replace(self.rollout.header(self.nbytes), scores=type(self.scores).__name__)

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays of the sample."""
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
        wrong = sorted(name for name, array in arrays.items() if not sound(name, array))
        if wrong:
            raise ScoreError(
                f"sample {self.rollout.uid} of teacher {self.rollout.prompt.teacher}: NaN or "
                f"infinity in its {', '.join(wrong)}"
            )


@dataclass(frozen=True)
class Header:
    """The fields of a queued item that are read without decoding its payload.

    ``tokens`` are those of prompt and response, of which ``response_tokens`` are the response's.
    ``scores`` is the name of a sample's kind of scores. ``images`` are widths and heights, in
    pixels. ``segments`` are the numbers of tokens of each, if there are several. ``versions`` are
    pairs of a weight version and the number of response tokens that were sampled under it, of a
    response of several versions; none of one version. Of other items than rollouts and samples the
    fields with defaults are not set.
    """

    uid: Uid
    tokens: int
    nbytes: int
    oldest_version: int
    teacher: str
    response_tokens: int = 0
    finish_reason: FinishReason = "stop"
    reward: float | None = None
    data_source: str = ""
    scores: str = ""
    images: tuple[tuple[int, int], ...] = ()
    episode: EpisodeFacts | None = None
    segments: tuple[int, ...] = ()
    versions: tuple[tuple[int, int], ...] = ()

    @property
    def turns(self) -> int:
        """The sampled turns; 1 without an environment."""
        return self.episode.turns if self.episode else 1

    def tokens_since(self, version: int) -> int:
        """The number of response tokens that were sampled under this version or a later one."""
        every = self.versions or ((self.oldest_version, self.response_tokens),)
        return sum(tokens for sampled, tokens in every if sampled >= version)

    def staleness(self, version: int) -> int:
        """The trainer's ``version`` minus the oldest token's, at least 0."""
        return max(0, version - self.oldest_version)


@dataclass(frozen=True)
class DeadLetter:
    """A rollout that will never be trained, the reason, and the ``stage`` that dead-lettered it.

    For a prompt that cannot be sampled at all, the header has the prompt's uid and the letter
    counts for all its rollouts.
    """

    header: Header
    reason: str
    stage: str = "teacher"

    @classmethod
    def of_prompt(cls, prompt: Prompt, uid: Uid, stage: str, reason: str) -> DeadLetter:
        """The letter of a rollout of this prompt that was never sampled."""
        header = Header(uid, len(prompt.token_ids), 0, NO_VERSION, prompt.teacher)
        return cls(header, reason, stage)
