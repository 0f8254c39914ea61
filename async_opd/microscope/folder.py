"""The folder ``microscope/`` of a run directory: ``step_<step>.rank_<rank>.npz``.

    samples of a rank's step ──RecordWriter──► step_000012.rank_0.npz ──records──► SampleRecord, …

Each rank has its share of ``log.microscope.max_mib`` for its own files. Where a file would exceed
it, those of every second recorded step are removed: the steps that are left are multiples of
``stride``, which doubles each time.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from async_opd.core.uid import Uid
from async_opd.files.foreign import ForeignPath, Place, foreign
from async_opd.files.safe_open import make_folder, write_atomically
from async_opd.microscope.record import (
    FILE_BYTES,
    RecordError,
    SampleRecord,
    excess,
    from_bytes,
    joined,
    to_bytes,
)

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
