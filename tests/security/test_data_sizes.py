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
    parquet_length,
    parquet_rows,
    refuse_large_group,
    row_groups,
    size_of,
)
from async_opd.data.fields import MAX_ROW_BYTES
from async_opd.data.files import FileSource
from async_opd.files.foreign import ForeignPath
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


def bits(count: int) -> pyarrow.Array:
    return pyarrow.Array.from_buffers(
        pyarrow.bool_(), count, [None, pyarrow.py_buffer(bytes(count // 8 + 1))]
    )


VALUES = {
    "bits": lambda: lists(bits(MANY)),
    "texts": lambda: repeated(17),
    "nothing": lambda: lists(pyarrow.nulls(MANY)),
    "sections": lambda: lists(pyarrow.StructArray.from_buffers(pyarrow.struct([]), MANY, [None])),
    "views": lambda: lists(views(17)),
}


@pytest.mark.parametrize("name", VALUES)
def test_a_row_that_becomes_too_large_is_refused_before_it_becomes_objects(
    tmp_path: Path, name: str
) -> None:
    datasets_folder(tmp_path / "data", table(VALUES[name]()), {})
    with little_memory():
        (found,) = rows_of(tmp_path / "data")
    assert isinstance(found, SourceError)
    assert (found.message, found.row) == ("is too large: more than 16 MiB", 1)


@pytest.mark.parametrize("name", ["bits", "texts"])
@pytest.mark.slow
def test_so_is_one_of_a_parquet_file(tmp_path: Path, name: str) -> None:
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(table(VALUES[name]()), file)
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


@pytest.mark.slow
def test_rows_with_long_values_are_decoded_one_by_one(tmp_path: Path) -> None:
    file = tmp_path / "a.parquet"
    value = "x" * (33 << 20)
    pyarrow.parquet.write_table(pyarrow.table({"a": [value] * 5}), file)
    before = pyarrow.total_allocated_bytes()
    rows = parquet_rows(file)
    assert next(rows) is None
    assert pyarrow.total_allocated_bytes() - before < 4 * len(value)
    assert list(rows) == [None] * 4


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


I32, I64, BINARY, LIST, SECTION = 5, 6, 8, 9, 12
INDEX_PAGE = 1


def number(value: int) -> bytes:
    """A number as thrift has it, in groups of 7 bits."""
    tail = bytes([value & 127 | (128 if value > 127 else 0)])
    return tail + (number(value >> 7) if value > 127 else b"")


def section(*fields: tuple[int, int, Any]) -> bytes:
    """Fields, each of a number, a kind and a value, which is bytes if it is no integer."""
    made = b""
    for field, kind, value in fields:
        made += bytes([kind]) + number(2 * field)
        made += value if isinstance(value, bytes) else number(2 * value)
    return made + b"\0"


def text(value: str) -> bytes:
    return number(len(value)) + value.encode()


def list_of(kind: int, values: list[bytes]) -> bytes:
    return bytes([0xF0 | kind]) + number(len(values)) + b"".join(values)


def page(size: int, stored: int, *more: tuple[int, int, Any], kind: int = 0) -> bytes:
    """The header of a page of one value."""
    about = section((1, I32, 1), (2, I32, 0), (3, I32, 3), (4, I32, 3))
    return section((1, I32, kind), (2, I32, size), (3, I32, stored), (5, SECTION, about), *more)


def parquet_of(pages: bytes, columns: int = 1) -> bytes:
    """A parquet file whose columns of texts, one value each, all have the same pages."""
    root = section((4, BINARY, text("schema")), (5, I32, columns))
    schema, chunks = [root], []
    for one in range(columns):
        name = text(f"c{one}")
        schema.append(section((1, I32, 6), (3, I32, 0), (4, BINARY, name), (6, I32, 0)))
        encodings = (2, LIST, list_of(I32, [number(0)]))
        sizes = [(5, I64, 1), (6, I64, 200), (7, I64, len(pages)), (9, I64, 4)]
        path = (3, LIST, list_of(BINARY, [name]))
        about = section((1, I32, 6), encodings, path, (4, I32, 6), *sizes)
        chunks.append(section((2, I64, 4), (3, SECTION, about)))
    chunked = list_of(SECTION, chunks)
    group = section((1, LIST, chunked), (2, I64, 200), (3, I64, 1))
    parts = [(2, LIST, list_of(SECTION, schema)), (3, I64, 1), (4, LIST, list_of(SECTION, [group]))]
    footer = section((1, I32, 2), *parts)
    return b"PAR1" + pages + footer + struct.pack("<I", len(footer)) + b"PAR1"


LARGE = struct.pack("<I", 32 << 20) + bytes(32 << 20)
PRESSED = pyarrow.compress(LARGE, codec="zstd", asbytes=True)
DIFFERENTLY_READ = {
    "a field number of more than 15 bits": (
        page(100, len(PRESSED), (65536 + 2, I32, len(LARGE))) + PRESSED,
        "a number of 16 bits",
    ),
    "a size of more than 32 bits": (
        page((1 << 32) + len(LARGE), len(PRESSED)) + PRESSED,
        "a number of 32 bits",
    ),
    "a page that pyarrow passes over": (
        page(0, 0, kind=INDEX_PAGE) + page(len(LARGE), len(PRESSED)) + PRESSED,
        "a page has the type 1",
    ),
    "more pages than values": (
        page(0, 0) + page((2 << 30) - 1, len(PRESSED)) + PRESSED,
        "bytes of a row group are decoded at once",
    ),
}


@pytest.mark.parametrize("name", DIFFERENTLY_READ)
def test_pages_that_pyarrow_reads_differently_are_refused_before_they_are_decoded(
    tmp_path: Path, name: str
) -> None:
    pages, cause = DIFFERENTLY_READ[name]
    file = tmp_path / "a.parquet"
    file.write_bytes(parquet_of(pages))
    with pytest.raises(SourceError, match=cause):
        rows_of(file)


def test_such_a_file_with_an_honest_header_is_read(tmp_path: Path) -> None:
    stored = pyarrow.compress(struct.pack("<I", 2) + b"ab", codec="zstd", asbytes=True)
    file = tmp_path / "a.parquet"
    file.write_bytes(parquet_of(page(6, len(stored)) + stored))
    assert list(parquet_rows(file)) == [{"c0": "ab"}]


def test_pages_of_all_columns_of_a_row_group_are_counted_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("async_opd.data.arrow_rows.MAX_PAGES", 8)
    file = io.BytesIO(parquet_of(page(0, 0) * 3, columns=3))
    (group,) = row_groups(file)
    with pytest.raises(ValueError, match="a row group has more than 8 pages"):
        refuse_large_group(group, [False] * 3, file)


@pytest.mark.parametrize("read", [parquet_length, lambda path: list(parquet_rows(path))])
def test_the_bound_of_a_footer_comes_before_pyarrow_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: Any
) -> None:
    for name in ("ParquetFile", "read_metadata"):
        monkeypatch.setattr(pyarrow.parquet, name, lambda *_, **__: pytest.fail("it is read"))
    length = (4 << 20) + 1
    (tmp_path / "a.parquet").write_bytes(bytes(length) + struct.pack("<I", length) + b"PAR1")
    with pytest.raises(ValueError, match="its footer says that it has 4194305 bytes"):
        read(ForeignPath(tmp_path) / "a.parquet")


def test_batches_of_an_older_version_are_not_read(tmp_path: Path) -> None:
    made = table(pyarrow.array([LONG]))
    datasets_folder(tmp_path / "data", made, {})
    older = pyarrow.ipc.IpcWriteOptions(metadata_version=pyarrow.ipc.MetadataVersion.V4)
    with pyarrow.ipc.new_stream(tmp_path / "data/data.arrow", made.schema, options=older) as stream:
        stream.write_table(made)
    with pytest.raises(SourceError, match="not of Arrow's metadata version 5"):
        rows_of(tmp_path / "data")


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
