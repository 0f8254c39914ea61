"""The files of a trainer's state: each rank writes its own parts, any number of ranks reads them.

    rank 0 ──► trainer-0-of-2.safetensors ──┐    ┌──► rank 0 of 3 reads what overlaps its parts
    rank 1 ──► trainer-1-of-2.safetensors ──┴────┼──► rank 1 of 3
                                                 └──► rank 2 of 3

A file's metadata says where each tensor that is only a part lies in the full one. A part that
several ranks have is in one file. ``trainer.safetensors``, which earlier versions wrote, is the
file of a single rank. Reading unpickles nothing.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from async_opd.core.errors import CheckpointError
from async_opd.core.reports import WrittenFile
from async_opd.core.stages import TRAINER
from async_opd.files.durable import written_file

FORMAT_ERRORS = (AttributeError, LookupError, TypeError, ValueError, OverflowError, RecursionError)
"""Errors of reading a safetensors file that ``write_shard`` did not write."""
FORMER_FILE = "trainer.safetensors"
"""The only file of a checkpoint of an earlier version; its tensors are all full."""
_NAME = re.compile(r"trainer-(\d+)-of-(\d+)\.safetensors")

Where = tuple[slice, ...]
"""A part of a full tensor: one slice a dimension."""


@dataclass(frozen=True)
class Stamp:
    """The common fields of all files of one checkpoint; ``id`` is drawn for each.

    ``frozen`` is ``saving.state.frozen_digest``, '' if it is not known; ``balance`` the text of
    ``batches.balance.Balance``, '' without automatic weights of teachers.
    """

    step: int
    version: int
    ranks: int
    id: str
    frozen: str = ""
    balance: str = ""


@dataclass(frozen=True)
class Part:
    """A part of a full tensor of this ``shape``, in host memory."""

    tensor: torch.Tensor
    where: Where
    shape: tuple[int, ...]


Parts = Mapping[str, Part]


def shard_name(rank: int, ranks: int) -> str:
    """The name of a rank's file."""
    return f"trainer-{rank}-of-{ranks}.safetensors"


def write_shard(folder: Path, rank: int, stamp: Stamp, parts: Parts) -> WrittenFile:
    """Writes a rank's file and flushes it to the disk. CheckpointError if it cannot be written."""
    path = folder / shard_name(rank, stamp.ranks)
    places = {
        name: [[one.start for one in part.where], part.shape]
        for name, part in parts.items()
        if part.shape != tuple(part.tensor.shape)
    }
    metadata = {name: str(value) for name, value in vars(stamp).items()}
    metadata |= {"rank": str(rank), "parts": json.dumps(places)}
    try:
        save_file({name: part.tensor for name, part in parts.items()}, path, metadata=metadata)
        return written_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(TRAINER, f"{path} cannot be written: {error}") from error


class Shards:
    """The files of one checkpoint, opened; tensors are read when they are asked for."""

    def __init__(self, folder: Path) -> None:
        """CheckpointError if a file is missing, damaged, or of another checkpoint."""
        self._folder = folder
        self._pieces: dict[str, list[_Piece]] = {}
        paths = _shard_files(folder)
        stamps: dict[str, Stamp] = {}
        try:
            for rank, path in enumerate(paths):
                stamps[path.name] = self._open(rank, path)
        except (OSError, SafetensorError, *FORMAT_ERRORS) as error:
            raise self._unreadable(error) from error
        self.stamp = stamps[paths[0].name]
        foreign = [name for name, stamp in stamps.items() if stamp != self.stamp]
        if foreign or self.stamp.ranks != len(paths):
            found = "; ".join(f"{name}: {stamp}" for name, stamp in stamps.items())
            raise CheckpointError(
                TRAINER, f"{folder} has trainer files of different checkpoints: {found}", _REMEDY
            )

    @property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(self._pieces)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of the full tensor."""
        return self._pieces[name][0].shape

    def fits(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the stored tensor is of this one's shape and type."""
        empty = tuple(slice(0, 0) for _ in tensor.shape)
        return self.shape(name) == tuple(tensor.shape) and (
            self._empty(name, empty).dtype == tensor.dtype
        )

    def read(self, name: str, where: Where | None = None) -> torch.Tensor:
        """This part of a full tensor, or all of it, in host memory.

        CheckpointError if it is not stored exactly once, or not readable.
        """
        if where is None:
            where = tuple(slice(0, size) for size in self.shape(name))
        try:
            return self._read(name, where)
        except (OSError, SafetensorError, *FORMAT_ERRORS) as error:
            raise self._unreadable(error) from error

    def _read(self, name: str, where: Where) -> torch.Tensor:
        common = [(piece, _overlap(piece.where, where)) for piece in self._pieces[name]]
        found = [(piece, both) for piece, both in common if _volume(both)]
        twice = any(_volume(_overlap(a, b)) for (_, a), (_, b) in combinations(found, 2))
        if twice or sum(_volume(both) for _, both in found) != _volume(where):
            names = ", ".join(piece.path.name for piece, _ in found) or "no file"
            kind = "twice" if twice else "only in part"
            raise CheckpointError(
                TRAINER, f"{self._folder} has {name} {_place(where)} {kind} ({names})", _REMEDY
            )
        if len(found) == 1:
            return found[0][0].read(where)
        result = self._empty(name, where)
        for piece, both in found:
            result[_within(both, where)] = piece.read(both)
        return result

    def _empty(self, name: str, where: Where) -> torch.Tensor:
        """A tensor of the type of this one, for a part of it."""
        piece = self._pieces[name][0]
        dtype = piece.read(tuple(slice(one.start, one.start) for one in piece.where)).dtype
        return torch.empty([one.stop - one.start for one in where], dtype=dtype)

    def _open(self, rank: int, path: Path) -> Stamp:
        """Notes the pieces of a file; returns its stamp."""
        file: Any = safe_open(path, "pt")
        metadata = file.metadata()
        places = json.loads(metadata.get("parts", "{}"))
        for name in file.keys():  # noqa: SIM118
            size = tuple(file.get_slice(name).get_shape())
            starts, shape = places.get(name, [[0] * len(size), size])
            where = tuple(slice(int(a), int(a) + n) for a, n in zip(starts, size, strict=True))
            limits = zip(where, map(int, shape), strict=True)
            pieces = self._pieces.setdefault(name, [])
            piece = _Piece(path, file, name, where, tuple(shape))
            if any(not 0 <= one.start <= one.stop <= limit for one, limit in limits) or (
                pieces and (pieces[0].shape, pieces[0].kind) != (piece.shape, piece.kind)
            ):
                raise ValueError(f"{path.name} has {name} {_place(where)} of {shape}, {piece.kind}")
            pieces.append(piece)
        step, version = int(metadata["step"]), int(metadata["version"])
        if path.name == FORMER_FILE:
            return Stamp(step, version, 1, "")
        if int(metadata["rank"]) != rank:
            raise ValueError(f"{path.name} is the file of rank {metadata['rank']}")
        frozen, balance = metadata.get("frozen", ""), metadata.get("balance", "")
        return Stamp(step, version, int(metadata["ranks"]), metadata["id"], frozen, balance)

    def _unreadable(self, error: Exception) -> CheckpointError:
        if isinstance(error, CheckpointError):
            return error
        cause = f"{self._folder} cannot be read: {type(error).__name__}: {error}"
        return CheckpointError(TRAINER, cause, _REMEDY)


@dataclass(frozen=True)
class _Piece:
    """A tensor in a file, which is a part of the full one of this shape."""

    path: Path
    file: Any
    name: str
    where: Where
    shape: tuple[int, ...]

    @property
    def kind(self) -> str:
        """The type of its entries, as safetensors names it."""
        return str(self.file.get_slice(self.name).get_dtype())

    def read(self, where: Where) -> torch.Tensor:
        """The part of the piece at this place of the full tensor."""
        if not where:
            return self.file.get_tensor(self.name)  # type: ignore[no-any-return]
        found: torch.Tensor = self.file.get_slice(self.name)[_within(where, self.where)]
        return found


def _shard_files(folder: Path) -> list[Path]:
    """The files of all ranks, in order. CheckpointError, with names, if they are not complete."""
    if (folder / FORMER_FILE).exists():
        return [folder / FORMER_FILE]
    found = sorted(path.name for path in folder.glob("trainer-*.safetensors"))
    counts = {int(match[2]) for name in found if (match := _NAME.fullmatch(name))}
    ranks = max(counts, default=1)
    expected = [shard_name(rank, ranks) for rank in range(min(ranks, len(found) + 1))]
    missing = sorted(set(expected) - set(found))
    others = [name for name in found if not name.endswith(f"-of-{ranks}.safetensors")]
    if missing or others or len(found) != ranks:
        cause = f"{folder} has not the files of {ranks} ranks:"
        cause += f" missing {missing}" * bool(missing)
        cause += f" of other checkpoints {others}" * bool(others)
        raise CheckpointError(TRAINER, f"{cause} among {found}", _REMEDY)
    return [folder / name for name in expected]


_REMEDY = "remove this checkpoint: --resume takes the one before"


def _overlap(one: Where, other: Where) -> Where:
    """The common part of both; empty slices where they have nothing."""
    starts = [max(a.start, b.start) for a, b in zip(one, other, strict=True)]
    stops = [min(a.stop, b.stop) for a, b in zip(one, other, strict=True)]
    return tuple(slice(a, max(a, b)) for a, b in zip(starts, stops, strict=True))


def _within(where: Where, outer: Where) -> Where:
    """``where``, counted from the start of ``outer``."""
    pairs = zip(where, outer, strict=True)
    return tuple(slice(one.start - all_.start, one.stop - all_.start) for one, all_ in pairs)


def _volume(where: Where) -> int:
    return math.prod(one.stop - one.start for one in where)


def _place(where: Where) -> str:
    return "[" + ", ".join(f"{one.start}:{one.stop}" for one in where) + "]"
