"""Records the tokens of some samples of each step of one rank, as the loss saw them.

    micro-batch ──mark──► rows that are recorded ──loss──► values ──take──┐ every micro-batch
                                                                          ▼
    microscope/step_N.rank_R.npz ◄──thread── SampleRecord ◄──finish── one copy to the host

The copy is one a step, whatever the number of tokens; decoding, compressing and writing are on a
separate thread. While a step's records are still being written, the next step's are lost, which
is counted: no step waits for a disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from async_opd.core.samples import Rollout, Sample
from async_opd.core.scores import SampledLogprobs
from async_opd.microscope import (
    CLAMPS,
    IDS,
    MICROSCOPE,
    Column,
    RecordedTurn,
    RecordWriter,
    SampleRecord,
    is_recorded,
)
from trainer.batches.micro_batches import MicroBatch
from trainer.batches.packing import Packed
from trainer.batches.token_weights import TokenWeight
from trainer.losses.base import Kept, Recorded
from trainer.losses.recorded import STUDENT, TEACHER, TOP
from trainer.losses.report import Metrics
from trainer.notes import note

if TYPE_CHECKING:
    from async_opd.config.run_config import RunConfig

VALUES = (
    STUDENT,
    TEACHER,
    "distillation",
    "surrogate",
    "total",
    "importance",
    "importance_weight",
    "entropy",
    "teacher_entropy",
)
"""Values of tokens that the objective gives and that become columns of the same name."""
CONTEXT_TOKENS = 512
"""Of the context before a turn of an episode that a record has as text, the last ones."""
FLUSH_S = 30.0
"""Seconds that the end of a run, or a step that failed, waits for records to be written."""


class Speller(Protocol):
    """Makes text of tokens: the student's tokenizer."""

    def decode(self, ids: list[int]) -> str:
        """Text of a sequence."""
        ...

    def token(self, token: int) -> str:
        """Text of one token, as it stands within a text."""
        ...


@dataclass(frozen=True)
class _Part:
    """Recorded tokens of a sample: their number, and where they are in the response and rows."""

    sample: Sample
    token_weight: TokenWeight
    kept: Kept

    def __len__(self) -> int:
        return self.kept.stop - self.kept.start


@dataclass(frozen=True)
class _Taken:
    """A micro-batch's recorded values, by name [tokens, …]; on the device, all in ``flat``."""

    parts: tuple[_Part, ...]
    shapes: dict[str, torch.Size]
    flat: torch.Tensor


class Recorder:
    """Chooses samples by uid, takes the values of their tokens, and hands them to the writer."""

    def __init__(
        self,
        writer: RecordWriter,
        *,
        seed: int,
        share: float,
        top_k: int,
        speller: Callable[[], Speller],
    ) -> None:
        """``speller`` loads the tokenizer; it is called once, on the writing thread."""
        self._writer, self._speller = writer, speller
        self._seed, self._share, self._top_k = seed, share, top_k
        self._spelling: Speller | None = None
        self._thread = ThreadPoolExecutor(1, "microscope")
        self._writing: Future[None] | None = None
        self._taken: list[_Taken] = []
        self._step = 0
        self.first = True
        """Of ranks that share rows only the first one counts the samples that are left out."""
        self._left_out = self._lost = 0
        self._warned = False

    def begin(self) -> None:
        """A step begins: values that an earlier, failed step has left are dropped."""
        self._taken = []

    def mark(self, packed: Packed, micro_batch: MicroBatch) -> Packed:
        """The micro-batch, whose loss gives the values of recorded rows too."""
        if not micro_batch.counts or micro_batch.supervised:
            return packed
        rows, start = [], 0
        for index, sample in enumerate(micro_batch.samples):
            stop = start + len(sample.rollout.response_ids)
            if stop > start and is_recorded(sample.rollout.uid, self._seed, self._share):
                rows.append(Kept(index, 0, start, stop))
            start = stop
        if not rows:
            return packed
        if (self._step + 1) % self._writer.stride:  # a step that the writer would remove
            self._left_out += len(rows) if self.first else 0
            return packed
        recorded = Recorded(tuple(rows), self._top_k)
        return replace(packed, tokens=replace(packed.tokens, recorded=recorded))

    def take(self, packed: Packed, micro_batch: MicroBatch, values: Metrics) -> None:
        """Keeps the recorded values on the device until the step is over."""
        recorded = packed.tokens.recorded
        if recorded is None or not recorded.rows or not values:
            return
        found = {name: recorded.of(values[name]) for name in (*VALUES, *CLAMPS) if name in values}
        found |= {name: values[name] for name in TOP if name in values}
        parts = tuple(
            _Part(micro_batch.samples[one.sample], micro_batch.token_weights[one.sample], one)
            for one in recorded.rows
        )
        flat = torch.cat([value.detach().double().reshape(-1) for value in found.values()])
        self._taken.append(_Taken(parts, {k: v.shape for k, v in found.items()}, flat))

    def finish(self, step: int, version: int, skipped: str) -> dict[str, float]:
        """Hands the step's records over to the thread; returns metrics.

        ``step`` is the number of this step in the metrics, ``version`` the trainer's weight version
        in it, ``skipped`` why it changed no weights, else ''.
        """
        taken, self._taken, self._step = self._taken, [], step
        samples = _begun(taken)
        if taken and self._writing is not None and not self._writing.done():
            self._lost += samples
        elif taken:
            values = torch.cat([one.flat for one in taken]).cpu().numpy()
            self._writing = self._thread.submit(self._write, taken, values, step, version, skipped)
            if skipped:  # the run may end by it
                self.flush()
        return {
            "microscope/samples": float(samples),
            "microscope/removed": float(self._left_out + self._writer.removed),
            "microscope/lost": float(self._lost),
        }

    def flush(self) -> None:
        """Waits until the last step's records are written, or for ``FLUSH_S``."""
        if self._writing is not None:
            wait([self._writing], FLUSH_S)

    # ── on the writing thread ──────────────────────────────────────────────────────────────────

    def _write(
        self, taken: Sequence[_Taken], values: Column, step: int, version: int, skipped: str
    ) -> None:
        """Writes the step's file. An error is noted once and counts the samples as lost."""
        try:
            samples, start = [], 0
            for one in taken:
                end = start + len(one.flat)
                samples += _samples(one, values[start:end], step, version, skipped)
                start = end
            self._writer.write(step, self._spelled(samples, taken))
        except Exception as error:  # no training ends for want of records
            self._lost += _begun(taken)
            if not self._warned:
                self._warned = True
                note(f"log.microscope: records of step {step} are lost: {error!r}")

    def _spelled(
        self, samples: Sequence[SampleRecord], taken: Sequence[_Taken]
    ) -> list[SampleRecord]:
        """The records with their texts: of the prompt, and of each token that occurs in the step.

        Without a tokenizer there are none, and readers show ids.
        """
        if self._spelling is None:
            self._spelling = self._speller()
        spelling = self._spelling
        columns = [one[name] for one in samples for name in IDS if name in one.columns]
        seen = np.unique(np.concatenate([column.reshape(-1) for column in columns])).tolist()
        texts = {token: spelling.token(token) for token in seen}
        rollouts = [part.sample.rollout for one in taken for part in one.parts]
        return [
            replace(
                one,
                texts=texts,
                prompt=spelling.decode(rollout.prompt.token_ids.tolist()),
                turns=_turns(rollout, spelling),
            )
            for one, rollout in zip(samples, rollouts, strict=True)
        ]


def _turns(rollout: Rollout, spelling: Speller) -> tuple[RecordedTurn, ...]:
    """The turns of an episode; none without an environment."""
    made: list[RecordedTurn] = []
    tokens, last, sampled = rollout.token_ids, len(rollout.prompt.token_ids), 0
    for start, end in rollout.positions if rollout.episode else ():
        begun = [first for first, _ in rollout.segments if first < start]
        context = tokens[max(last, begun[-1], start - CONTEXT_TOKENS) : start]
        made.append(RecordedTurn(sampled, len(begun) - 1, spelling.decode(context.tolist())))
        last, sampled = end, sampled + end - start
    return tuple(made)


def _begun(taken: Sequence[_Taken]) -> int:
    """Samples whose first token this rank has: of ranks that share rows one counts each."""
    return sum(part.kept.first == 0 for one in taken for part in one.parts)


def _samples(
    taken: _Taken, values: Column, step: int, version: int, skipped: str
) -> list[SampleRecord]:
    """A record, still without texts, of each sample of a micro-batch."""
    columns, start = dict[str, Column](), 0
    for name, shape in taken.shapes.items():
        end = start + math.prod(shape)
        columns[name] = values[start:end].reshape(shape)
        start = end
    made, start = [], 0
    for part in taken.parts:
        end = start + len(part)
        own = {name: column[start:end] for name, column in columns.items()}
        made.append(_sample(part, own, step, version, skipped))
        start = end
    return made


def _sample(
    part: _Part, values: dict[str, Column], step: int, version: int, skipped: str
) -> SampleRecord:
    rollout, weight = part.sample.rollout, part.token_weight
    own = slice(part.kept.first, part.kept.first + len(part))
    versions = np.empty(len(rollout.response_ids), np.int32)
    for span in rollout.version_spans:
        versions[span.start : span.end] = span.version
    flags = {name: values.pop(name) != 0 for name in CLAMPS if name in values}
    if isinstance(part.sample.scores, SampledLogprobs):
        flags["floored"] = values[TEACHER] > part.sample.scores.logprobs[own]
    flags["masked"] = flags.get("masked", False) | np.full(len(part), weight.weight == 0)
    clamps = sum(CLAMPS[name] * flag.astype(np.uint8) for name, flag in flags.items())
    ids = {name: values.pop(name).astype(np.int32) for name in IDS if name in values}
    columns: dict[str, Column] = {
        "position": np.arange(own.start, own.stop, dtype=np.int32),
        "token": np.asarray(rollout.response_ids[own], np.int32),
        "version": versions[own],
        "rollout_logprob": np.asarray(rollout.rollout_logprobs[own], np.float32),
        **{name: column.astype(np.float32) for name, column in values.items()},
        **ids,
        "clamps": np.asarray(clamps, np.uint8),
    }
    return SampleRecord(
        uid=rollout.uid,
        step=step,
        version=version,
        teacher=rollout.prompt.teacher,
        data_source=rollout.prompt.data_source,
        prompt="",
        response_tokens=len(rollout.response_ids),
        finish_reason=rollout.finish_reason,
        weight=weight.weight,
        reward_weight=weight.reward_weight,
        advantage=weight.advantage,
        reward=rollout.reward,
        skipped=skipped,
        images=rollout.prompt.media + rollout.media,
        columns=columns,
    )


def recorder_of(config: RunConfig, rank: int) -> Recorder | None:
    """Records the tokens of a rank's samples; None if no share of them is recorded."""
    from async_opd.models.tokenizer import Text  # a learner without a config imports neither
    from async_opd.pictures import ShownText

    settings = config.log.microscope
    if not settings.share:
        return None
    most = int(settings.max_mib * (1 << 20)) // config.train.ranks
    recorder = Recorder(
        RecordWriter(Path(config.run_dir or ".") / MICROSCOPE, rank, most),
        seed=config.seed,
        share=settings.share,
        top_k=settings.top_k,
        speller=lambda: ShownText.of(Text(config.student.model), config.student.model),
    )
    recorder.first = rank % config.train.context_parallel == 0
    return recorder
