"""Files of a sharded state: any ranks read what any others wrote, and nothing but that."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.errors import CheckpointError
from trainer.saving.shards import Part, Shards, Stamp, shard_name, write_shard

STAMP = Stamp(2, 2, 2, "a")
Cuts = Sequence[int]
"""Where a dimension is cut: each rank's last row, ascending."""


def whole(tensor: torch.Tensor) -> Part:
    return part(tensor, tuple(slice(0, size) for size in tensor.shape))


def part(tensor: torch.Tensor, where: tuple[slice, ...]) -> Part:
    return Part(tensor[where].contiguous(), where, tuple(tensor.shape))


def halves(tensor: torch.Tensor) -> list[Part]:
    """The parts of two ranks."""
    return by_rows(tensor, 2)


def by_rows(tensor: torch.Tensor, ranks: int) -> list[Part]:
    """Each rank's part, as FSDP shards: the same number of rows, the last ranks fewer or none."""
    size = -(-len(tensor) // ranks)
    starts = [min(rank * size, len(tensor)) for rank in range(ranks + 1)]
    rest = tuple(slice(0, length) for length in tensor.shape[1:])
    return [part(tensor, (slice(a, b), *rest)) for a, b in pairwise(starts)]


def write(folder: Path, tensors: dict[str, list[Part]], ranks: int) -> None:
    """A file for each rank; a rank whose part is empty, or that has none, writes none."""
    for rank in range(ranks):
        own = {name: parts[rank] for name, parts in tensors.items() if rank < len(parts)}
        stamp = Stamp(7, 3, ranks, "a")
        write_shard(
            folder, rank, stamp, {name: one for name, one in own.items() if one.tensor.numel()}
        )


SHAPES = st.lists(st.integers(1, 7), max_size=3).map(tuple)
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.uint8, torch.int64])


def numbered(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Every entry has another value."""
    return torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)


@given(
    shapes=st.lists(st.tuples(SHAPES, DTYPES), max_size=3),
    writers=st.integers(1, 9),
    readers=st.integers(1, 9),
)
def test_any_ranks_read_bit_for_bit_what_any_others_wrote(
    shapes: list[tuple[tuple[int, ...], torch.dtype]], writers: int, readers: int
) -> None:
    tensors = {f"model/{i}": numbered(*given) for i, given in enumerate(shapes)}
    stored = {name: by_rows(t, writers) if t.ndim else [whole(t)] for name, t in tensors.items()}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), stored, writers)
        shards = Shards(Path(folder))
        assert shards.names == tensors.keys()
        for name, tensor in tensors.items():
            assert torch.equal(shards.read(name), tensor)
            for own in by_rows(tensor, readers) if tensor.ndim else [whole(tensor)]:
                found = shards.read(name, own.where)
                assert (found.dtype, found.shape) == (own.tensor.dtype, own.tensor.shape)
                assert torch.equal(found, own.tensor)


def cut(size: int, cuts: Cuts) -> list[slice]:
    at = sorted({0, size, *(min(one, size) for one in cuts)})
    return [slice(a, b) for a, b in pairwise(at)]


@given(
    rows=st.lists(st.integers(0, 6), max_size=3),
    columns=st.lists(st.integers(0, 5), max_size=3),
    at=st.tuples(*[st.integers(0, n) for n in (6, 6, 5, 5)]),
)
def test_blocks_of_two_axes_are_joined(rows: Cuts, columns: Cuts, at: tuple[int, ...]) -> None:
    tensor = numbered((6, 5), torch.float32)
    blocks = [part(tensor, (a, b)) for a in cut(6, rows) for b in cut(5, columns)]
    (top, bottom), (left, right) = sorted(at[:2]), sorted(at[2:])
    where = (slice(top, bottom), slice(left, right))
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), {"t": blocks}, len(blocks))
        assert torch.equal(Shards(Path(folder)).read("t", where), tensor[where])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The files of two ranks."""
    write(tmp_path, {"t": halves(numbered((5, 2), torch.float32))}, 2)
    return tmp_path


def test_the_stamp_comes_back(folder: Path) -> None:
    assert Shards(folder).stamp == Stamp(7, 3, 2, "a")


def test_a_folder_without_files_of_a_trainer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"missing \['trainer-0-of-1\.safetensors'\]"):
        Shards(tmp_path)


@pytest.mark.parametrize("rank", range(3))
def test_the_file_of_a_rank_that_is_missing_is_named(rank: int, tmp_path: Path) -> None:
    write(tmp_path, {"t": by_rows(numbered((5, 2), torch.float32), 3)}, 3)
    (tmp_path / shard_name(rank, 3)).unlink()
    with pytest.raises(CheckpointError, match=rf"3 ranks: missing \['trainer-{rank}-of-3"):
        Shards(tmp_path)


def test_the_file_of_another_number_of_ranks_is_named(folder: Path) -> None:
    write(folder, {"t": [whole(numbered((5, 2), torch.float32))]}, 1)
    with pytest.raises(CheckpointError, match=r"of other checkpoints \['trainer-0-of-1"):
        Shards(folder)


def test_the_file_of_another_rank_is_refused(folder: Path) -> None:
    (folder / shard_name(0, 2)).write_bytes((folder / shard_name(1, 2)).read_bytes())
    with pytest.raises(CheckpointError, match=r"trainer-0-of-2\.safetensors is the file of rank 1"):
        Shards(folder)


@pytest.mark.parametrize("stamp", [Stamp(8, 3, 2, "a"), Stamp(7, 4, 2, "a"), Stamp(7, 3, 2, "b")])
def test_the_file_of_another_checkpoint_is_refused(folder: Path, stamp: Stamp) -> None:
    tensor = numbered((5, 2), torch.float32)
    (folder / shard_name(1, 2)).unlink()
    write_shard(folder, 1, stamp, {"t": halves(tensor)[1]})
    with pytest.raises(CheckpointError, match=rf"of different .*{re.escape(str(stamp))}"):
        Shards(folder)


@pytest.mark.parametrize(
    ("second", "kind"),
    [(slice(4, 5), "only in part"), (slice(2, 5), "twice"), (slice(0, 2), "twice")],
)
def test_rows_of_no_file_or_of_two_are_refused(second: slice, kind: str, tmp_path: Path) -> None:
    tensor = numbered((5, 2), torch.float32)
    columns = slice(0, 2)
    given = [part(tensor, (slice(0, 3), columns)), part(tensor, (second, columns))]
    write(tmp_path, {"t": given}, 2)
    with pytest.raises(CheckpointError, match=f"has t .*{kind} .*trainer-0-of-2.*trainer-1-of-2"):
        Shards(tmp_path).read("t")


@pytest.mark.parametrize(
    "second",
    [
        Part(torch.zeros(2, 2), (slice(3, 5), slice(0, 2)), (6, 2)),
        Part(torch.zeros(2, 2), (slice(4, 6), slice(0, 2)), (5, 2)),
        Part(torch.zeros(2, 2, dtype=torch.bfloat16), (slice(3, 5), slice(0, 2)), (5, 2)),
        Part(torch.zeros(2), (slice(3, 5),), (5,)),
    ],
    ids=["of another shape", "outside", "of another type", "of another dimension"],
)
def test_a_part_that_does_not_belong_to_the_others_is_refused(second: Part, folder: Path) -> None:
    (folder / shard_name(1, 2)).unlink()
    write_shard(folder, 1, Stamp(7, 3, 2, "a"), {"t": second})
    with pytest.raises(CheckpointError, match=r"trainer-1-of-2\.safetensors has t"):
        Shards(folder)


def test_a_folder_that_cannot_be_written_is_a_checkpoint_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"trainer-0-of-2\.safetensors cannot be written"):
        write_shard(tmp_path / "missing", 0, STAMP, {})


@given(data=st.data())
def test_whatever_is_in_a_file_it_is_read_or_a_checkpoint_error(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, {"t": halves(numbered((5, 2), torch.float32))}, 2)
        file = folder / shard_name(data.draw(st.integers(0, 1)), 2)
        content = bytearray(file.read_bytes())
        for at in data.draw(st.lists(st.integers(0, len(content) - 1), max_size=3)):
            content[at] = data.draw(st.integers(0, 255))
        for old, new in data.draw(st.lists(st.sampled_from(LIES), max_size=2)):
            content = content.replace(old, new)  # of the same length: the header stays one
        file.write_bytes(bytes(content))
        with suppress(CheckpointError):
            read_all(folder)


def read_all(folder: Path) -> dict[str, Any]:
    shards = Shards(folder)
    return {name: shards.read(name) for name in shards.names}


LIES = [
    (b"step", b"stop"),
    (b"ranks", b"ronks"),
    (b'"2"', b'"9"'),
    (b"[5, 2]", b"[9, 2]"),
    (b"[5, 2]", b"[52 ] "),
    (b"[3, 0]", b"[-3,0]"),
    (b"[3, 0]", b"[{},0]"),
    (b"F32", b"I32"),
]
