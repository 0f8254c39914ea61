"""The record of a sample: for each of its tokens what the loss computed, column by column.

    SampleRecord, … ──to_bytes──► one .npz file without pickle ──from_bytes──► SampleRecord, …

The columns of a file are those of all its samples, one after the other; ``head`` is JSON with
everything else. A reader of a later version may find columns that it does not know.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from async_opd.core.errors import AsyncOPDError
from async_opd.core.row import Media

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
loss (a truncated response under ``loss.mask_truncated``)."""


FILE_BYTES = 256 << 20
"""Most of a file's arrays, which are compressed in it; a quarter of it is the most of ``head``."""


class RecordError(AsyncOPDError):
    """A file of records that cannot be read."""


@dataclass(frozen=True)
class SampleRecord:
    """Tokens of one sample's response in one step: all ``response_tokens``, or a rank's share.

    ``version`` is the trainer's weight version in the step. ``weight`` is that of each token in the
    distillation loss (denominators are in it), ``reward_weight`` in the reward's. ``skipped`` is
    why the step changed no weights, else ''. ``prompt`` is text, ``images`` are the sample's.
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
    declared, head = sum(size for _, size in sizes), max(s for n, s in sizes if n == "head.npy")
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
            head = json.loads(bytes(file["head"]))
            columns = {name: file[name] for name in file.files if name in COLUMNS}
        tokens = sum(int(one["tokens"]) for one in head["samples"])
        for name, column in columns.items():
            if column.dtype.kind not in "iuf" or len(column) != tokens:
                raise ValueError(f"{name} has not a number for each of {tokens} tokens")
        texts = {int(token): str(text) for token, text in head["texts"].items()}
        samples, start = [], 0
        for one in head["samples"]:
            end = start + int(one.pop("tokens"))
            own = {name: column[start:end] for name, column in columns.items()}
            images = tuple(Media(**image) for image in one.pop("images", ()))
            samples.append(SampleRecord(**one, images=images, columns=own, texts=texts))
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
