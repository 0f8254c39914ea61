"""A stranger's parquet and Arrow files: a few bytes of them do not become much memory."""

from __future__ import annotations

import io
import struct
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.data import arrow_rows as arrow_sizes
from async_opd.data.arrow_rows import (
    ABOUT,
    COLUMNS,
    DECOMPRESSED,
    is_small,
    parquet_rows,
    refuse_large_group,
    row_groups,
    size_of,
)
from async_opd.data.fields import MAX_ROW_BYTES
from async_opd.data.files import FileSource
from tests.security.hostile_data import GOOD, datasets_folder

MANY = MAX_ROW_BYTES + 1
LONG = "x" * (1 << 20)


def rows_of(path: Path) -> list[Any]:
    """Rows, and why others are none."""
    return list(FileSource(path=str(path)).rows(0, DataConfig(train=[])))


def table(value: Any) -> pyarrow.Table:
    """One row with a further column."""
    return pyarrow.table({**{name: [one] for name, one in GOOD.items()}, "more": value})


def repeated(count: int) -> pyarrow.Array:
    """One list of the same text so many times, which the array has once."""
    places = pyarrow.array([0] * count, pyarrow.int32())
    return lists(pyarrow.DictionaryArray.from_arrays(places, pyarrow.array([LONG])))


def lists(values: pyarrow.Array) -> pyarrow.Array:
    return pyarrow.ListArray.from_arrays(pyarrow.array([0, len(values)], pyarrow.int32()), values)


@contextmanager
def little_memory() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


def views(count: int) -> pyarrow.Array:
    """The same text so many times, which the array has once."""
    _, view, text = pyarrow.array([LONG], pyarrow.string_view()).buffers()
    repeated = pyarrow.py_buffer(view.to_pybytes()[:16] * count)
    return pyarrow.Array.from_buffers(pyarrow.string_view(), count, [None, repeated, text])


BITS = pyarrow.array([False] * 8).take(pyarrow.array([0] * MANY, pyarrow.int8()))
VALUES = {
    "bits": lists(BITS),
    "texts": repeated(17),
    "nothing": lists(pyarrow.nulls(MANY)),
    "sections": lists(pyarrow.StructArray.from_buffers(pyarrow.struct([]), MANY, [None])),
    "views": lists(views(17)),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_row_that_becomes_too_large_is_refused_before_it_becomes_objects(
    tmp_path: Path, name: str
) -> None:
    datasets_folder(tmp_path / "data", table(VALUES[name]), {})
    with little_memory():
        (found,) = rows_of(tmp_path / "data")
    assert isinstance(found, SourceError)
    assert (found.message, found.row) == ("is too large: more than 16 MiB", 1)


@pytest.mark.parametrize("name", ["bits", "texts"])
def test_so_is_one_of_a_parquet_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table(VALUES[name]), file)
    assert file.stat().st_size < 1 << 20
    with little_memory():
        (found,) = rows_of(file)
    assert isinstance(found, SourceError)
    assert found.message == "is too large: more than 16 MiB"


def test_a_row_group_with_more_than_its_rows_may_have_is_not_decoded(tmp_path: Path) -> None:
    value = ["x" * (12 << 20)]
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": value, "b": value, "c": value}), file)
    before = pyarrow.total_allocated_bytes()
    with pytest.raises(
        SourceError, match=r"a row group of 1 rows has 37\d+ bytes, more than 16 MiB a row"
    ):
        rows_of(file)
    assert pyarrow.total_allocated_bytes() - before < 1 << 20


def test_what_is_decoded_at_once_is_bounded_by_pages_of_all_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.parquet"
    made = pyarrow.table({"a": [LONG] * 9, "b": [LONG + "y"] * 9})
    pyarrow.parquet.write_table(made, file)
    monkeypatch.setattr("async_opd.data.arrow_rows.AT_ONCE_BYTES", 2 * len(LONG))
    with pytest.raises(SourceError, match="write it with fewer rows in a group"):
        rows_of(file)
    monkeypatch.setattr("async_opd.data.arrow_rows.AT_ONCE_BYTES", 2 * len(LONG) + 1000)
    assert len(rows_of(file)) == 9


def test_values_of_lists_count_however_few_bytes_say_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table(lists(pyarrow.array([0] * 200_000))), file)
    monkeypatch.setattr("async_opd.data.arrow_rows.AT_ONCE_BYTES", 1 << 20)
    with pytest.raises(SourceError, match="bytes of a row group are decoded at once"):
        rows_of(file)


def test_a_footer_with_a_field_twice_is_refused_since_readers_differ_in_which_counts() -> None:
    field_1_twice = b"\x15\x02\x05\x02\x02\x00"
    with pytest.raises(ValueError, match="field 1 of its footer or of a page is there twice"):
        row_groups(io.BytesIO(field_1_twice + struct.pack("<I", len(field_1_twice)) + b"PAR1"))


def test_a_footer_that_says_less_than_its_pages_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": [LONG]}), file)
    with file.open("rb") as opened:
        (group,) = row_groups(opened)
        group[COLUMNS][0][ABOUT][DECOMPRESSED] = 1
        assert refuse_large_group(group, [False], opened) > len(LONG)
        monkeypatch.setattr("async_opd.data.arrow_rows.AT_ONCE_BYTES", 1000)
        with pytest.raises(ValueError, match="are decoded at once, more than 1000"):
            refuse_large_group(group, [False], opened)


def test_rows_with_long_values_are_decoded_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    value = "x" * (33 << 20)
    pyarrow.parquet.write_table(pyarrow.table({"a": [value] * 8}), file)
    before = pyarrow.total_allocated_bytes()
    rows = parquet_rows(file)
    assert next(rows) is None
    assert pyarrow.total_allocated_bytes() - before < 4 * len(value)
    assert list(rows) == [None] * 7


@pytest.mark.parametrize("dictionary", [False, True])
def test_compressed_batches_are_not_read(tmp_path: Path, dictionary: bool) -> None:
    made = table(pyarrow.array([LONG]))
    if dictionary:
        made = made.set_column(0, "more", made["more"].dictionary_encode())
    datasets_folder(tmp_path / "data", made, {})
    options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
    file = tmp_path / "data" / "data.arrow"
    with pyarrow.ipc.new_stream(file, made.schema, options=options) as stream:
        stream.write_table(made)
    with pytest.raises(SourceError, match="its batches are compressed"):
        rows_of(tmp_path / "data")


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("small") / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["b", "c"], "d": [[1], [2, 3]]}), file)
    return file


@given(at=st.integers(0, 10_000), new=st.binary(min_size=1, max_size=8))
def test_changed_bytes_of_pages_and_footers_end_with_sizes_or_an_error(
    small: Path, at: int, new: bytes
) -> None:
    content = small.read_bytes()
    at %= len(content)
    file = io.BytesIO(content[:at] + new + content[at + len(new) :])
    try:
        for group in row_groups(file):
            refuse_large_group(group, [False, True], file)
    except (ValueError, LookupError, TypeError, AttributeError, struct.error):
        return


SIZES = [
    (pyarrow.array(["ab", None]), 4),
    (pyarrow.array([b"ab"], pyarrow.binary(2)), 3),
    (pyarrow.array([[1, 2], None, [3]]).slice(2, 1), 2),
    (pyarrow.array([[1, 2], [3, 4]], pyarrow.list_(pyarrow.int64(), 2)).slice(1, 1), 3),
    (pyarrow.array([[("a", 1)], [("bc", 2)]], pyarrow.map_(pyarrow.string(), pyarrow.int8())), 9),
    (pyarrow.array([{"a": "xy", "b": [1]}]), 6),
    (pyarrow.array(["abc", "abc"]).dictionary_encode(), 8),
    (pyarrow.array(["abc", "d"], pyarrow.string_view()).slice(1, 1), 2),
]


@pytest.mark.parametrize(("array", "size"), SIZES, ids=[str(array.type) for array, _ in SIZES])
def test_the_size_of_values_counts_letters_bytes_and_values(array: Any, size: int) -> None:
    assert size_of(array) == size


@pytest.mark.parametrize(
    "kind",
    [pyarrow.decimal128(9, 2), pyarrow.decimal256(50, 0), pyarrow.float64(), pyarrow.string()],
    ids=str,
)
def test_the_size_of_few_values_with_a_place_each_is_bounded_without_counting_them(
    kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = pyarrow.array(["1", None, "3", "4"]).cast(kind)
    array = pyarrow.StructArray.from_arrays([texts], ["a"]).slice(1, 2)
    assert size_of(array) <= 8 * array.nbytes
    monkeypatch.setattr(arrow_sizes, "size_of", lambda _: pytest.fail("its values are counted"))
    assert is_small(array, 8 * array.nbytes)


def test_types_of_unknown_size_are_not_read() -> None:
    runs = pyarrow.RunEndEncodedArray.from_arrays([1 << 30], [LONG])
    with pytest.raises(ValueError, match="values of type run_end_encoded"):
        size_of(runs)
