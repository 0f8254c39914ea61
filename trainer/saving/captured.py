"""A rank's copy of its part of the state, until a thread has written it beside training.

between two steps: capture ──► parts in host memory ··· write ──► this rank's file, checksum
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from async_opd.core.errors import CheckpointError
from async_opd.core.stages import TRAINER
from async_opd.core.written_file import WrittenFile
from trainer.saving.shards import Parts, Stamp, shard_name, write_shard
from trainer.saving.state import copy_parts


@dataclass(frozen=True)
class RankFile:
    """A rank's written part: its file, or the reason why there is none.

    The reason is returned and not raised: an error would end the group of ranks, and the run.
    """

    name: str
    written: WrittenFile | None
    fault: str = ""


class CapturedParts:
    """The last copy of rank ``rank``'s parts that was not written yet."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._stamp: Stamp | None = None
        self._parts: Parts = {}

    def capture(self, model: Any, optimizer: torch.optim.Optimizer, stamp: Stamp) -> int:
        """Copies this rank's parts to host memory; returns their bytes."""
        self._parts = {}  # before the next copy is made: two would double the memory
        self._parts = copy_parts(model, optimizer, self._rank)
        self._stamp = stamp
        return sum(part.tensor.nbytes for part in self._parts.values())

    def write(self, folder: str) -> RankFile:
        """Writes the copy to this rank's file in the folder, and forgets it."""
        stamp, parts = self._stamp, self._parts
        self._stamp, self._parts = None, {}
        if stamp is None:
            return RankFile("", None, f"rank {self._rank} was to write without a capture before")
        name = shard_name(self._rank, stamp.ranks)
        try:
            return RankFile(name, write_shard(Path(folder), self._rank, stamp, parts))
        except CheckpointError as error:
            return RankFile(name, None, error.cause)


def all_written(files: Sequence[RankFile]) -> Mapping[str, WrittenFile]:
    """The files of all ranks by name. CheckpointError with the reasons of those without one."""
    faults = [file.fault for file in files if file.written is None]
    if faults:
        raise CheckpointError(TRAINER, "; ".join(faults))
    return {file.name: file.written for file in files if file.written is not None}
