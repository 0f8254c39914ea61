"""Records of single tokens: which samples have one, its columns, its files.

The record of a sample has, for each of its tokens, what the loss computed, column by column. The
trainer's ranks write records, ``async_opd inspect`` and the report read them.

    SampleRecord, … ──to_bytes──► one .npz file without pickle ──from_bytes──► SampleRecord, …

The columns of a file are those of all its samples, one after the other; ``head`` is JSON with
everything else. A reader of a later version may find columns that it does not know.

The folder ``microscope/`` of a run directory has ``step_<step>.rank_<rank>.npz``:

    samples of a rank's step ──RecordWriter──► step_000012.rank_0.npz ──records──► SampleRecord, …

Each rank has its share of ``log.microscope.max_mib`` for its own files. Where a file would exceed
it, those of every second recorded step are removed: the steps that are left are multiples of
``stride``, which doubles each time.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from async_opd.core.errors import AsyncOPDError
from async_opd.core.row import Media
from async_opd.core.uid import Uid
from async_opd.files.foreign import ForeignPath, Place, foreign
from async_opd.files.safe_open import make_folder, write_atomically

Column = NDArray[Any]

COLUMNS: dict[str, str] = {
    "position": "index of the token in the response, from 0",
    "token": "id of the sampled token",
    "version": "weight version that sampled it",
    "rollout_logprob": "log mu: of the distribution that was sampled, when it was sampled",
    "student_logprob": "log q: of the student in this step, at temperature 1",
    "teacher_logprob": "log p: of the teacher, not below loss.teacher_floor",
    "distillation": "the distillation loss, clamped, before weights",
    "surrogate": "the reward's clipped surrogate, before its weight; to be minimized",
    "total": "summand of the step's loss: all weights are in it, their sum over the batch is "
    "loss/total",
    "importance": "q / mu of the token, at the rollouts' temperature, whether the loss uses it",
    "importance_weight": "what multiplies the distillation loss, truncated at loss.importance_cap",
    "entropy": "the student's, over its vocabulary",
    "teacher_entropy": "the teacher's; of a top-k support with the rest as one outcome",
    "clamps": "bits: see CLAMPS",
    "student_ids": "the student's most probable tokens in this step, by falling probability",
    "student_logprobs": "log q of these",
    "support_ids": "tokens whose teacher's log-probabilities the loss has: of the teacher's top-k, "
    "or of the student's at sampling, the first ones; of a whole vocabulary the teacher's most "
    "probable",
    "support_teacher_logprobs": "log p of these",
    "support_student_logprobs": "log q of these",
}
"""Meaning of each column. Log-probabilities, losses and entropies are in nats, of one token."""
IDS = ("token", "student_ids", "support_ids")
"""The columns of token ids."""
CLAMPS = {
    "clamped": 1,
    "truncated": 2,
    "clipped": 4,
    "dual_clipped": 8,
    "floored": 16,
    "masked": 32,
}
"""Bits of the column ``clamps``: the distillation loss was scaled down to ``loss.clamp``; the
importance weight was truncated at its cap; the reward's ratio was clipped (no gradient), by its
dual clip; log p was raised to ``loss.teacher_floor``; the token has no weight in the distillation
loss (a truncated response under ``loss.mask_truncated``, or a token that is too old under
``async.on_stale: mask``)."""
FILE_BYTES = 256 << 20
"""Most of a file's arrays, which are compressed in it; a quarter of it is the most of ``head``."""


class RecordError(AsyncOPDError):
    """A file of records that cannot be read."""


class RecordedTurn(NamedTuple):
    """A turn of an episode, which begins with token ``start`` of the response, in a ``segment``.

    ``context`` is text: the end of that between the turn before, or the segment's start, and it.
    """

    start: int
    segment: int
    context: str


@dataclass(frozen=True)
class SampleRecord:
    """Tokens of one sample's response in one step: all ``response_tokens``, or a rank's share.

    ``version`` is the trainer's weight version in the step. ``weight`` is that of each token in the
    distillation loss (denominators are in it), ``reward_weight`` in the reward's. ``skipped`` is
    why the step changed no weights, else ''. ``prompt`` is text, ``images`` are the sample's.
    ``turns`` are those of an episode.
    """

    uid: str
    step: int
    version: int
    teacher: str
    data_source: str
    prompt: str
    response_tokens: int
    finish_reason: str
    weight: float
    reward_weight: float = 0.0
    advantage: float | None = None
    reward: float | None = None
    skipped: str = ""
    images: tuple[Media, ...] = ()
    turns: tuple[RecordedTurn, ...] = ()
    columns: Mapping[str, Column] = field(default_factory=dict)
    texts: Mapping[int, str] = field(default_factory=dict, repr=False)

    def __len__(self) -> int:
        return len(self.columns["token"])

    def __getitem__(self, column: str) -> Column:
        return self.columns[column]

    @property
    def gap(self) -> Column:
        """log q - log p of each sampled token: above 0 where the student likes it more."""
        return self["student_logprob"] - self["teacher_logprob"]

    @property
    def loss(self) -> Column:
        """The distillation loss of each token, plus the reward's where there is one; no weights."""
        reward = self.columns.get("surrogate")
        return self["distillation"] if reward is None else self["distillation"] + reward

    @property
    def staleness(self) -> int:
        """The trainer's version minus that of the oldest token, at least 0."""
        return max(0, self.version - int(self["version"].min(initial=self.version)))

    def by_turn(self) -> list[tuple[str, range]]:
        """The rows of each turn, after its number, segment and context; without turns '' and all.

        Of a complete record.
        """
        starts = [one.start for one in self.turns] or [0]
        titles = [
            f"turn {number}, segment {one.segment}: {one.context}"
            for number, one in enumerate(self.turns, 1)
        ]
        rows, ends = range(len(self)), [*starts[1:], len(self)]
        parts = zip(titles or [""], starts, ends, strict=True)
        return [(title, rows[start:end]) for title, start, end in parts]

    def text(self, token: int) -> str:
        """Text of a token; its id in angle brackets where the record has none."""
        return self.texts.get(int(token), f"⟨{token}⟩")

    def clamps(self, index: int) -> list[str]:
        """Names of the clamps of a token, see CLAMPS."""
        bits = int(self["clamps"][index])
        return [name for name, bit in CLAMPS.items() if bits & bit]


def to_bytes(samples: Sequence[SampleRecord]) -> bytes:
    """A file with these samples, which have the same columns and texts."""
    columns = {
        name: np.concatenate([one.columns[name] for one in samples]) for name in samples[0].columns
    }
    heads = []
    for one in samples:
        head = {**vars(one), "columns": None, "texts": None, "tokens": len(one)}
        head["images"] = [image._asdict() for image in one.images] or None
        head["turns"] = one.turns or None
        heads.append({key: value for key, value in head.items() if value is not None})
    texts = {str(token): text for token, text in samples[0].texts.items()}
    head_bytes = json.dumps({"samples": heads, "texts": texts}).encode()
    file = io.BytesIO()
    columns["head"] = np.frombuffer(head_bytes, np.uint8)
    np.savez_compressed(file, **columns)  # type: ignore[arg-type]
    return file.getvalue()


def excess(content: bytes, most: int = FILE_BYTES) -> str | None:
    """Which arrays of a file have too many bytes, by the sizes that it says; None if none has."""
    with zipfile.ZipFile(io.BytesIO(content)) as file:
        sizes = [(one.filename, one.file_size) for one in file.infolist()]
    declared = sum(size for _, size in sizes)
    head = max(size for name, size in sizes if name in ("head", "head.npy"))
    if declared > most or head > FILE_BYTES // 4:
        return f"its arrays have {declared} bytes, its head {head}: more than {most >> 20} MiB"
    return None


def from_bytes(content: bytes, most: int = FILE_BYTES) -> list[SampleRecord]:
    """The samples of a file. RecordError, also if its arrays have more bytes than ``most``."""
    try:
        # the archive's sizes are true: reading an array ends at them
        if found := excess(content, most):
            raise ValueError(found)
        with np.load(io.BytesIO(content), allow_pickle=False) as file:
            head = file["head"]
            if not isinstance(head, np.ndarray) or head.dtype != np.uint8 or head.ndim != 1:
                raise ValueError("its head is not a row of bytes")
            head = json.loads(head.tobytes())
            columns = {name: file[name] for name in file.files if name in COLUMNS}
        tokens = sum(int(one["tokens"]) for one in head["samples"])
        for name in dict.fromkeys(("token", *columns)):  # rows of no numbers could be any number
            column, ndim = columns[name], 2 if name.endswith(("_ids", "_logprobs")) else 1
            if column.dtype.kind not in "iuf" or column.ndim != ndim or len(column) != tokens:
                raise ValueError(f"{name} has not a number for each of {tokens} tokens")
        texts = {int(token): str(text) for token, text in head["texts"].items()}
        samples, start = [], 0
        for one in head["samples"]:
            end = start + int(one.pop("tokens"))
            own = {name: column[start:end] for name, column in columns.items()}
            images = tuple(Media(**image) for image in one.pop("images", ()))
            turns = tuple(
                RecordedTurn(int(first), int(segment), str(context))
                for first, segment, context in one.pop("turns", ())
            )
            samples.append(
                SampleRecord(**one, images=images, turns=turns, columns=own, texts=texts)
            )
            start = end
    except Exception as error:  # of a torn file numpy, zipfile and zlib raise many kinds
        raise RecordError(f"no file of records: {type(error).__name__}: {error}") from error
    return samples


def joined(shares: Sequence[SampleRecord]) -> SampleRecord:
    """One record of the shares of a sample that several ranks computed, by position."""
    if len(shares) == 1:
        return shares[0]
    columns = {
        name: np.concatenate([one.columns[name] for one in shares]) for name in shares[0].columns
    }
    order = np.argsort(columns["position"], kind="stable")
    texts = {token: text for one in shares for token, text in one.texts.items()}
    fields = {**vars(shares[0]), "texts": texts}
    return SampleRecord(**{**fields, "columns": {n: c[order] for n, c in columns.items()}})


MICROSCOPE = "microscope"
"""The folder's name."""
STEP_BYTES = 4 * FILE_BYTES
"""Most of the arrays of all ranks in a step."""
_FILE = re.compile(r"step_(\d+)\.rank_(\d+)\.npz")


def is_recorded(uid: Uid, seed: int, share: float) -> bool:
    """Whether a sample is among the ``share`` of all samples that are recorded."""
    digest = hashlib.blake2b(f"{seed}/{uid}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def files(folder: Place) -> dict[tuple[int, int], ForeignPath]:
    """The files of a folder by (step, rank), in this order; none without a folder. OSError."""
    found = ((_FILE.fullmatch(path.name), path) for path in foreign(folder).entries())
    return dict(sorted(((int(name[1]), int(name[2])), path) for name, path in found if name))


def records(run_dir: Place, steps: Sequence[int] | None = None) -> Iterator[SampleRecord]:
    """The recorded samples of a run, or of some of its steps, in the order of steps.

    A file that cannot be read is left out, and so is a sample of which some tokens are not there
    (``unreadable``): its sums would be wrong.
    """
    return (one for one in _joined(run_dir, steps) if len(one) == one.response_tokens)


def unreadable(run_dir: Place) -> Iterator[str]:
    """Each file that cannot be read, and why; each step with samples that are not complete."""
    for _, path, found in _read(run_dir):
        if isinstance(found, str):
            yield f"{path.name}: {found}"
    partial = [one for one in _joined(run_dir) if len(one) != one.response_tokens]
    for step, of_step in groupby(partial, lambda one: one.step):
        first, *others = of_step
        yield (
            f"step {step}: {1 + len(others)} samples are left out: of {first.uid} are "
            f"{len(first)} of {first.response_tokens} tokens there, the others were on another rank"
        )


def _joined(run_dir: Place, steps: Sequence[int] | None = None) -> Iterator[SampleRecord]:
    """The samples of readable files, each with the shares of all ranks that are there."""
    for _, of_step in groupby(_read(run_dir, steps), lambda one: one[0]):
        shares: defaultdict[str, list[SampleRecord]] = defaultdict(list)
        for _, _, found in of_step:
            for one in found if isinstance(found, list) else ():
                shares[one.uid].append(one)
        yield from map(joined, shares.values())


def _read(
    run_dir: Place, steps: Sequence[int] | None = None
) -> Iterator[tuple[int, ForeignPath, list[SampleRecord] | str]]:
    """Step, file and samples of each file, or why it cannot be read; a step's are held together."""
    last, left = -1, 0
    for (step, _), path in files(foreign(run_dir) / MICROSCOPE).items():
        if steps is not None and step not in steps:
            continue
        last, left = step, left if step == last else STEP_BYTES
        try:
            found = from_bytes(path.read(FILE_BYTES), min(left, FILE_BYTES))
        except (RecordError, OSError) as error:
            yield step, path, str(error)
            continue
        left -= sum(column.nbytes for one in found for column in one.columns.values())
        yield step, path, found


def forget_after(run_dir: Place, step: int) -> None:
    """Removes the records of later steps, which a rewound run computes again. OSError."""
    for (found, _), path in files(foreign(run_dir) / MICROSCOPE).items():
        if found > step:
            path.remove()


@dataclass
class RecordWriter:
    """Writes one rank's files, which have at most ``max_bytes`` in all.

    ``removed`` are samples that were recorded and did not find room, since this object was made.
    One that several ranks share counts on the rank that has its first token.
    """

    folder: Path
    rank: int
    max_bytes: int
    stride: int = 1
    removed: int = 0
    _kept: dict[int, tuple[int, int]] | None = field(default=None, init=False)

    def write(self, step: int, samples: Sequence[SampleRecord]) -> None:
        """Writes the step's file, in place of an earlier one of the same step. OSError.

        Of samples that would take more than a quarter of all bytes only the first ones are kept.
        """
        given = _begun(samples)
        content = to_bytes(samples) if samples else b""
        while content and (len(content) > self.max_bytes / 4 or excess(content)):
            samples = samples[: len(samples) // 2]
            content = to_bytes(samples) if samples else b""
        make_folder(self.folder)
        kept = self._own()
        kept.pop(step, None)
        while sum(size for size, _ in kept.values()) + len(content) > self.max_bytes:
            self._thin(kept)
        if step % self.stride or not samples:
            self.removed += given
            return
        self.removed += given - _begun(samples)
        write_atomically(self.folder / _name(step, self.rank), content, durable=False)
        kept[step] = len(content), _begun(samples)

    def _thin(self, kept: dict[int, tuple[int, int]]) -> None:
        """Removes the files of steps that are not multiples of twice the stride."""
        self.stride *= 2
        for step in [step for step in kept if step % self.stride]:
            (self.folder / _name(step, self.rank)).unlink(missing_ok=True)
            self.removed += kept.pop(step)[1]

    def _own(self) -> dict[int, tuple[int, int]]:
        """(bytes, samples) of this rank's files by step; those of an earlier process are there."""
        if self._kept is None:
            found = files(self.folder).items()
            own = [(step, path) for (step, rank), path in found if rank == self.rank]
            self._kept = {step: (path.stat().st_size, _samples(path)) for step, path in own}
        return self._kept


def _begun(samples: Sequence[SampleRecord]) -> int:
    """Samples whose first token is here, not on another rank."""
    return sum(bool(len(one)) and int(one["position"][0]) == 0 for one in samples)


def _samples(path: ForeignPath) -> int:
    try:
        return _begun(from_bytes(path.read(FILE_BYTES)))
    except RecordError:
        return 0


def _name(step: int, rank: int) -> str:
    return f"step_{step:06d}.rank_{rank}.npz"
