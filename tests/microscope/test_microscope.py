"""Records are read as they were written, take bounded bytes, and are spread over the run."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.core.row import Media
from async_opd.core.uid import Uid
from async_opd.microscope import (
    MICROSCOPE,
    RecordError,
    RecordWriter,
    SampleRecord,
    files,
    from_bytes,
    is_recorded,
    records,
    to_bytes,
    unreadable,
)
from tests.microscope.samples import TEXTS, record


def test_samples_are_read_as_they_were_written() -> None:
    given_ = [record("p/0", 4), record("q/1", 2, seed=1, advantage=-0.5, skipped="loss nan")]
    found = from_bytes(to_bytes(given_))
    for one, other in zip(given_, found, strict=True):
        assert (one.uid, one.advantage, one.skipped) == (other.uid, other.advantage, other.skipped)
        assert other.texts == TEXTS
        for name, column in one.columns.items():
            assert np.array_equal(column, other[name]), name


def test_the_images_of_a_sample_are_in_its_record() -> None:
    images = (Media("a" * 64, 900, 640, 480), Media("b" * 64, 80, 32, 16))
    found = from_bytes(to_bytes([record("p/0", images=images), record("q/0")]))
    assert [one.images for one in found] == [images, ()]


def test_the_shares_of_a_sample_on_several_ranks_are_one_record(tmp_path: Path) -> None:
    whole = record(tokens=5)
    for rank, rows in enumerate((slice(3, 5), slice(0, 3))):
        part = share(whole, rows)
        RecordWriter(tmp_path / MICROSCOPE, rank, 1 << 20).write(1, [part])
    (found,) = records(tmp_path)
    assert found["position"].tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(found["total"], whole["total"])


def share(whole: SampleRecord, rows: slice) -> SampleRecord:
    """The part of a sample in one of several ranks."""
    columns = {name: column[rows] for name, column in whole.columns.items()}
    return record(whole.uid, len(whole), columns=columns)


def test_a_sample_without_its_tokens_of_another_rank_is_left_out_and_named(tmp_path: Path) -> None:
    RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 20).write(
        1, [share(record("p/0", 5), slice(0, 3)), record("q/0")]
    )
    assert [one.uid for one in records(tmp_path)] == ["q/0"]
    (said,) = unreadable(tmp_path)
    assert said.startswith("step 1: 1 samples are left out: of p/0 are 3 of 5 tokens there")


def test_a_sample_that_ranks_share_is_removed_once(tmp_path: Path) -> None:
    writers = [RecordWriter(tmp_path, rank, 100) for rank in range(2)]  # no room for any
    for writer, rows in zip(writers, (slice(0, 3), slice(3, 5)), strict=True):
        writer.write(1, [share(record(tokens=5), rows)])
    assert [writer.removed for writer in writers] == [1, 0]


def test_a_file_that_cannot_be_read_is_left_out_and_named(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 20)
    writer.write(1, [record("p/0")])
    writer.write(2, [record("q/0", step=2)])
    path = files(tmp_path / MICROSCOPE)[1, 0]
    Path(str(path)).write_bytes(path.read()[:100])
    assert [one.uid for one in records(tmp_path)] == ["q/0"]
    assert [line.split(":")[0] for line in unreadable(tmp_path)] == ["step_000001.rank_0.npz"]


@given(st.binary(max_size=200))
def test_bytes_that_are_no_records_are_refused(content: bytes) -> None:
    with pytest.raises(RecordError):
        from_bytes(content)


@given(st.lists(st.integers(1, 40), min_size=1, max_size=60))
def test_files_have_bounded_bytes_and_the_rest_is_counted(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int]
) -> None:
    folder = tmp_path_factory.mktemp("records")
    writer = RecordWriter(folder, 0, 40_000)
    for step, tokens in enumerate(lengths, 1):
        writer.write(step, [record(f"p/{step}", tokens, step=step)])
        assert sum(path.stat().st_size for path in folder.glob("*")) <= 40_000
    assert len(files(folder)) + writer.removed == len(lengths)


def test_what_is_kept_is_spread_over_the_whole_run(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, 0, 60_000)
    for step in range(1, 101):
        writer.write(step, [record(step=step)])
    steps = [step for step, _ in files(tmp_path)]
    assert steps == list(range(writer.stride, 101, writer.stride))
    assert writer.stride in (8, 16, 32)


def test_of_a_step_with_too_many_samples_the_first_are_kept(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path, 0, 40_000)
    writer.write(1, [record(f"p/{i}", 30, seed=i) for i in range(16)])
    kept = from_bytes(files(tmp_path)[1, 0].read())
    assert [one.uid for one in kept] == [f"p/{i}" for i in range(len(kept))]
    assert 0 < len(kept) < 16
    assert writer.removed == 16 - len(kept)


def test_a_later_process_counts_the_files_of_the_one_before(tmp_path: Path) -> None:
    for part in range(4):
        writer = RecordWriter(tmp_path, 0, 60_000)
        for step in range(5 * part, 5 * part + 5):
            writer.write(step, [record(step=step)])
            assert sum(path.stat().st_size for path in tmp_path.glob("*")) <= 60_000


def test_a_step_that_is_trained_again_has_its_last_records(tmp_path: Path) -> None:
    writer = RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 20)
    writer.write(1, [record("p/0"), record("q/0")])
    writer.write(1, [record("r/0")])
    assert [one.uid for one in records(tmp_path)] == ["r/0"]


@given(st.text(min_size=1, max_size=20), st.integers(0, 9), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_records_what_a_smaller_one_does(
    uid: str, seed: int, one: float, other: float
) -> None:
    less, more = sorted((one, other))
    assert is_recorded(Uid(uid), seed, more) or not is_recorded(Uid(uid), seed, less)
    assert is_recorded(Uid(uid), seed, 1.0)
    assert not is_recorded(Uid(uid), seed, 0.0)


def test_the_share_of_all_uids_is_the_one_that_is_asked_for() -> None:
    found = sum(is_recorded(Uid(f"p{i}/0"), 3, 0.1) for i in range(5000))
    assert found == pytest.approx(500, abs=80)
