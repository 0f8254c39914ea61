"""The data that both ends of a weight transfer share: their plan of chunks, and the held rows.

sender (trainer)                       receivers (engines of the rollout replicas)
listen, send address and secret  ──►   join the group at rank_offset + own rank
for each chunk of the plan:            for each chunk of the plan:
    pack, broadcast               ──►      receive, unpack, load

Held rows are rows of tokens that the trainer and every replica of the student compute, to be
compared. They are fixed, the same in every run of a model: no state has to survive a restart, and
their tokens lie evenly over the whole vocabulary, which the samples of a task do not.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np

from async_opd.core.errors import WeightSyncError
from async_opd.core.row import Media
from async_opd.core.samples import Prompt, Rollout
from async_opd.core.sequence import Float32, Int32
from async_opd.core.uid import Uid, rollout_uid

EXPERT, BESIDE = "*", "+"
"""In the name of all experts of a layer: the number of one, and between tensors of each."""
PEFT_PREFIX = "base_model.model."
"""The prefix of adapters' tensors, in PEFT's files and in weight syncs."""
LENGTHS = (2, 5, 13, 33, 75)
"""Tokens of the rows: 128 in all, of which 123 are predicted."""
MOST_ROWS = len(LENGTHS) + 1
"""Rows of a VLM student, of which one has an image; others have one row less."""
GOLDEN = (math.sqrt(5) - 1) / 2
Kind = Literal["text", "image"]
"""Whether rows have an image."""
HELD = "held"
"""Data source and teacher of the rows, which have neither."""


@dataclass(frozen=True)
class HeldRow:
    """A prompt and the ``compared`` tokens behind it, in ``ids`` int32 [T].

    Of a VLM student one row has an image: ``media``, and its ``encoded`` bytes; its prompt
    has one placeholder for it.
    """

    ids: Int32
    compared: int
    media: tuple[Media, ...] = ()
    encoded: bytes = b""

    @property
    def images(self) -> dict[str, bytes]:
        """Encoded bytes by SHA-256."""
        return {one.sha256: self.encoded for one in self.media}

    def rollout(self, prompt_ids: Int32 | None = None) -> Rollout:
        """The row as a rollout, whose response is what is compared.

        ``prompt_ids`` replace those of the prompt, such as expanded ones.
        """
        uid = Uid(f"{HELD}:0")
        ids = self.ids[: -self.compared] if prompt_ids is None else prompt_ids
        prompt = Prompt(uid, HELD, HELD, ids, media=self.media, encoded=self.images)
        return Rollout.answer(
            rollout_uid(uid, 0), prompt, self.ids[-self.compared :].tolist(), "stop"
        )


def by_kind(rows: Sequence[HeldRow]) -> dict[Kind, list[int]]:
    """Indices of the rows of text, and of those with images, of kinds that there are."""
    kinds: dict[Kind, list[int]] = {"text": [], "image": []}
    for index, row in enumerate(rows):
        kinds["image" if row.media else "text"].append(index)
    return {kind: indices for kind, indices in kinds.items() if indices}


def held_rows(vocabulary: int, longest: int, without: Collection[int] = ()) -> tuple[HeldRow, ...]:
    """The rows of text for a model: 2 to ``longest`` tokens each, all but the first compared."""
    lengths = [max(2, min(length, longest)) for length in LENGTHS]
    ids = held_ids(sum(lengths), vocabulary, without)
    rows = np.split(ids, np.cumsum(lengths)[:-1])
    return tuple(HeldRow(one, len(one) - 1) for one in rows)


def held_ids(count: int, vocabulary: int, without: Collection[int] = ()) -> Int32:
    """So many token ids below ``vocabulary``, int32.

    The i-th is the fractional part of i times the golden ratio, times ``vocabulary``: any run of
    them lies evenly over the vocabulary. One of ``without``, such as tokens that stand for images,
    is replaced by the next one that is not.
    """
    ids: Int32 = (np.arange(1, count + 1) * GOLDEN % 1.0 * vocabulary).astype(np.int32)
    for at in np.flatnonzero(np.isin(ids, list(without))):
        while int(ids[at]) in without:
            ids[at] = (ids[at] + 1) % vocabulary
    return ids


@dataclass(frozen=True)
class Rendezvous:
    """Where the members of a transfer group connect. The sender is rank 0 of ``world_size``.

    ``secret`` authenticates a member: with gloo it is the key of
    ``async_opd.weight_sync.rendezvous``, with NCCL the group's unique id, which also holds host and
    port.
    """

    host: str
    port: int
    world_size: int
    timeout_s: float
    chunk_bytes: int
    secret: bytes = field(repr=False)
    seconds_per_byte: float = 0.0

    def broadcast_s(self, nbytes: int) -> float:
        """Bound of a broadcast of so many bytes, in seconds."""
        return self.timeout_s + nbytes * self.seconds_per_byte


@dataclass(frozen=True)
class Reference:
    """The trainer's log-probabilities of held rows under the weights of a snapshot.

    ``logprobs`` are those of each row's compared tokens, float32, in nats. ``noise`` is their
    mean absolute change in nats if the result of every module has a relative error that is uniform
    within ±1, extrapolated from smaller errors, for each kind of rows; ``rounding`` is
    the largest relative error of one rounding of the dtype in which the trainer computed them;
    ``seconds``: what computing took.
    """

    rows: tuple[HeldRow, ...]
    logprobs: tuple[Float32, ...]
    noise: Mapping[Kind, float]
    rounding: float
    seconds: float = 0.0

    def refuse_not_finite(self) -> None:
        """WeightSyncError unless all numbers are finite."""
        if not np.isfinite(np.hstack([[*self.noise.values()], *self.logprobs])).all():
            cause = "the trainer's own log-probabilities of held rows are not finite"
            raise WeightSyncError("weight sync", cause, "its weights are broken: resume the run")


@dataclass(frozen=True)
class WeightMeta:
    """Names, dtypes (``bfloat16``) and shapes of the tensors, in the order they are sent.

    All experts of a layer are one tensor under the name of ``experts_together``.
    ``digests`` are those of the tensors (``async_opd.weight_sync.digests``); ``reference`` is there
    if replicas are compared with the trainer after this sync. ``frozen`` names the student's
    tensors that are never sent: those of a frozen tower or projector. ``quantized`` are digests of
    what a quantized engine makes of the tensors, by name, with ``parameters.QUANTIZED`` before it.
    """

    names: tuple[str, ...]
    dtype_names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    itemsizes: tuple[int, ...]
    digests: tuple[str, ...] = ()
    reference: Reference | None = None
    frozen: tuple[str, ...] = ()
    quantized: Mapping[str, str] = field(default_factory=dict)

    @property
    def adapters(self) -> bool:
        """Whether the tensors are adapters of low rank, under PEFT's names, and no weights."""
        return bool(self.names) and all(name.startswith(PEFT_PREFIX) for name in self.names)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each tensor. Both ends ask for them once a tensor: they are counted once."""
        return tuple(
            math.prod(shape) * size for shape, size in zip(self.shapes, self.itemsizes, strict=True)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(self.sizes)


def experts_together(names: Sequence[str]) -> str:
    """The name of a tensor [experts, rows, columns] of those of expert 0, one above the other.

    ``experts.0.gate_proj.weight`` and ``experts.0.up_proj.weight`` are together
    ``experts.*.gate_proj.weight+up_proj.weight``. An empty text if no tensor can have them all.
    """
    parts = [name.rpartition(".0.") for name in names]
    if len({module for module, _, _ in parts}) != 1 or not parts[0][1]:
        return ""
    return f"{parts[0][0]}.{EXPERT}." + BESIDE.join(rest for _, _, rest in parts)


def tensors_of_an_expert(name: str) -> list[str]:
    """The names of the tensors of one expert, without its own; of any other tensor nothing."""
    return name.partition(f".{EXPERT}.")[2].split(BESIDE) if f".{EXPERT}." in name else []


def experts_apart(weights: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The tensors by name, those of each expert under its checkpoint names: views, no copies."""
    for name, tensor in weights:
        if not (parts := tensors_of_an_expert(name)):
            yield name, tensor
            continue
        module = name.partition(f".{EXPERT}.")[0]
        for number, expert in enumerate(tensor.unbind()):
            for part, rows in zip(parts, expert.chunk(len(parts)), strict=True):
                yield f"{module}.{number}.{part}", rows


def chunk_plan(sizes: Sequence[int], chunk_bytes: int) -> list[range]:
    """Cuts tensors into consecutive runs of at most ``chunk_bytes`` each.

    A tensor that is larger than that travels alone. Both ends compute the same plan.
    """
    plan: list[range] = []
    start, total = 0, 0
    for index, size in enumerate(sizes):
        if index > start and total + size > chunk_bytes:
            plan.append(range(start, index))
            start, total = index, 0
        total += size
    if start < len(sizes):
        plan.append(range(start, len(sizes)))
    return plan
