"""Rows of parquet files and of Hugging Face ``datasets`` directories, as they lie in the files.

Nothing in them is decoded: an image or a sound stays its bytes and its path, no file outside of the
folder is opened and no URL fetched. A row that would be too large is None.
Raises whatever a broken file makes pyarrow raise.

The size of rows in memory follows from the sizes in the files, before anything is decoded:

    a row group ──refuse_large_group──► pages that may be decoded
    a stream's messages ──refuse_compressed──► batches that are as large as the file
    a batch ──size_of──► what its values become as Python objects, those stored once for many, too

Encodings and compression let a file of a few bytes say gigabytes. Of broken files these functions
raise errors of many kinds.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow
import pyarrow.compute as compute
import pyarrow.ipc
import pyarrow.parquet
import pyarrow.types as types

from async_opd.data.fields import MAX_ROW_BYTES
from async_opd.files.foreign import ForeignPath
from async_opd.files.remote import RemoteFile

Fields = dict[str, Any] | None
AT_A_TIME = 64
"""Rows that become Python objects together, while they are small."""
FEW = 4
"""Rows of a parquet file that are decoded together: a long value that the file says once for many
rows is there once for each of these. One is, where a page is larger than two rows may be."""
BUFFER = 1 << 20
"""Bytes of each column that are read from a parquet file at once."""
SMALL = 1 << 20
"""Letters, bytes and values of such rows."""
MAX_STATE_BYTES = 1 << 20
"""Bytes of the JSON file that names the others."""
AT_ONCE_BYTES = 1 << 30
"""Most of a row group that is decoded at the same time: of each column a page and its dictionary,
and of a column with lists 8 bytes for each of its values, all of which one row may have."""
HEADER_BYTES = 1 << 16
MAX_PAGES = 100_000
"""Of all columns of a row group: each header is read."""
FOOTER_BYTES, TAIL_BYTES, MARK = 4 << 20, 8, b"PAR1"
"""Most of a footer: pyarrow takes some 200 times as much memory as one of few bytes a column."""
KINDS = {0: 5, 2: 7, 3: 8}
"""Types of pages with values (data, dictionary, data of version 2), and the fields of the header
that have their number. pyarrow passes over others, by another count of bytes."""
INTEGERS = {4: 16, 5: 32, 6: 64}
"""Bits of thrift's integers. pyarrow would cut off what a larger one has more."""
GROUPS, COLUMNS, ROWS, ABOUT = 4, 1, 3, 3
"""Fields of a footer, of a row group in it, and of a column in that."""
VALUES, DECOMPRESSED, COMPRESSED, FIRST, FIRST_DICTIONARY = 5, 6, 7, 9, 11
"""Fields of a column's statistics: numbers of values and bytes, and places in the file."""


def row_groups(file: IO[bytes]) -> list[Any]:
    """A parquet file's footer: its row groups, by the numbers of thrift's fields.

    Not by pyarrow: a column's sizes that are not valid end the process there. ValueError for a
    footer that is too large for pyarrow to read.
    """
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - TAIL_BYTES, 0))
    length, mark = struct.unpack_from("<I4s", file.read(TAIL_BYTES))
    if mark != MARK:
        raise ValueError("it does not end as a parquet file does")
    if length > min(size, FOOTER_BYTES):
        cause = f"its footer says that it has {length} bytes, of at most {FOOTER_BYTES}"
        raise ValueError(f"{cause}: write larger row groups, or several files")
    file.seek(size - TAIL_BYTES - length)
    groups: list[Any] = _Thrift(file.read(length)).section().get(GROUPS, [])
    return groups


def refuse_large_group(group: Any, repeated: list[bool], file: IO[bytes] | None) -> int:
    """The bytes of the largest page of a parquet row group. ValueError if too much is in it.

    ``repeated``: which columns have lists. Without the ``file`` the sizes of pages are not known:
    there is what the file's footer says, which a page may exceed.
    """
    at_once = largest = declared = 0
    left = MAX_PAGES
    for column, lists in zip(group[COLUMNS], repeated, strict=True):
        about = column[ABOUT]
        declared += about[DECOMPRESSED]
        pages = [] if file is None else list(islice(_pages(about, file), left + 1))
        left -= len(pages)
        if left < 0:
            raise ValueError(f"a row group has more than {MAX_PAGES} pages")
        for wanted in (True, False):
            sizes = (size for size, _, dictionary in pages if dictionary == wanted)
            at_once += max(sizes, default=0)
        if lists:
            counted = sum(values for _, values, dictionary in pages if not dictionary)
            at_once += 8 * max(about[VALUES], counted)
        largest = max([largest, *(size for size, _, _ in pages)])
    if declared > 2 * MAX_ROW_BYTES * group[ROWS]:
        most = f"more than {MAX_ROW_BYTES >> 20} MiB a row"
        raise ValueError(f"a row group of {group[ROWS]} rows has {declared} bytes, {most}")
    if at_once > AT_ONCE_BYTES:
        message = f"{at_once} bytes of a row group are decoded at once, more than {AT_ONCE_BYTES}"
        remedy = "write it with fewer rows in a group (row_group_size), or without use_dictionary"
        raise ValueError(f"{message}: {remedy}")
    return largest


def _pages(column: Any, file: IO[bytes]) -> Iterator[tuple[int, int, bool]]:
    """Decompressed bytes, number of values, and whether it is a dictionary, of each page.

    To the end of the column: the number of its values is that of the footer, and not of the pages.
    """
    at = min(start for start in (column[FIRST], column.get(FIRST_DICTIONARY, 0)) if start)
    end = at + column[COMPRESSED]
    while at < end:
        header, nbytes = _header(file, at)
        kind, size, stored = header[1], header[2], header[3]
        if kind not in KINDS:
            raise ValueError(f"a page has the type {kind}, of {sorted(KINDS)}")
        values = header[KINDS[kind]][1]
        if min(size, stored, values) < 0:
            raise ValueError("a page has a size below 0")
        at += nbytes + stored
        yield size, values, kind == 2


def _header(file: IO[bytes], at: int) -> tuple[dict[int, Any], int]:
    """A page's header, and its bytes. Statistics in it may have texts of the page."""
    for nbytes in (HEADER_BYTES, FOOTER_BYTES):
        file.seek(at)
        read = _Thrift(file.read(nbytes))
        with suppress(IndexError):
            return read.section(), read.at
    raise ValueError(f"the header of a page has more than {FOOTER_BYTES} bytes")


@dataclass
class _Thrift:
    """Thrift's compact form: numbers, sections and lists; texts are left out."""

    data: bytes
    at: int = 0

    def section(self) -> dict[int, Any]:
        """The fields of a section by their numbers."""
        fields: dict[int, Any] = {}
        field = 0
        while head := self._byte():
            field = field + (head >> 4) if head >> 4 else self._signed(16)
            if not 0 < field < 1 << 15:
                raise ValueError(f"its footer or a page has a field {field}")
            if field in fields:  # readers differ in which of them counts
                raise ValueError(f"field {field} of its footer or of a page is there twice")
            fields[field] = None if head & 15 in (1, 2) else self._value(head & 15)
        return fields

    def _value(self, kind: int) -> Any:
        if kind in INTEGERS:
            return self._signed(INTEGERS[kind])
        if kind == 12:
            return self.section()
        if kind in (9, 10):
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._number()
            if count > len(self.data) - self.at:
                raise ValueError(f"a list has {count} entries")
            return [self._value(head & 15) for _ in range(count)]
        skipped = self._number() if kind == 8 else {1: 1, 2: 1, 3: 1, 7: 8}[kind]
        self.at += skipped
        return None

    def _byte(self) -> int:
        self.at += 1
        return self.data[self.at - 1]

    def _number(self) -> int:
        found = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            found |= (byte & 127) << shift
            if byte < 128:
                return found
        raise ValueError("a number has more than 10 bytes")

    def _signed(self, bits: int) -> int:
        found = self._number()
        if found >> bits:
            raise ValueError(f"a number of {bits} bits is {found}")
        return (found >> 1) ^ -(found & 1)


def refuse_compressed(messages: Any) -> None:
    """ValueError if a stream of Arrow has compressed batches: each says how large it becomes.

    And for one of an older version, where they may be in a place that is not looked at.
    """
    for message in messages:
        if message.metadata_version != pyarrow.ipc.MetadataVersion.V5:
            raise ValueError("its messages are not of Arrow's metadata version 5: save it again")
        data = message.metadata.to_pybytes()
        (root,) = struct.unpack_from("<I", data)
        header = _field(data, root, 2)
        if message.type == "dictionary":
            header = _field(data, _follow(data, header), 1)
        if message.type != "schema" and _field(data, _follow(data, header), 3):
            raise ValueError("its batches are compressed, and so of any size: save it without")


def _field(data: bytes, table: int, number: int) -> int:
    """Where a table of a flatbuffer has a field; 0 if it has none."""
    places = table - struct.unpack_from("<i", data, table)[0]
    (size,) = struct.unpack_from("<H", data, places)
    if 4 + 2 * number >= size:
        return 0
    (offset,) = struct.unpack_from("<H", data, places + 4 + 2 * number)
    return table + offset if offset else 0


def _follow(data: bytes, at: int) -> int:
    (offset,) = struct.unpack_from("<I", data, at)
    return at + int(offset)


def is_small(array: Any, most: int) -> bool:
    """Whether ``size_of`` an array is at most so much. Quick where each value has a bit of it."""
    return (_is_plain(array.type) and 8 * array.nbytes <= most) or size_of(array) <= most


@lru_cache
def _is_plain(kind: Any) -> bool:
    """Whether each value of this type takes place in an array, however often it occurs."""
    if types.is_struct(kind) or types.is_list(kind) or types.is_large_list(kind):
        inner = [kind.field(number).type for number in range(kind.num_fields)]
        return bool(inner) and all(map(_is_plain, inner))
    fixed = types.is_primitive(kind) or types.is_decimal(kind)
    return fixed or any(is_text(kind) for is_text in TEXTS[:-1])


def size_of(array: Any) -> int:
    """Letters, bytes and values that an array becomes as Python objects.

    Of a dictionary each value counts as often as it occurs. ValueError for unknown types.
    """
    kind = array.type
    if isinstance(array, pyarrow.ExtensionArray):
        return size_of(array.storage)
    if types.is_struct(kind):
        return len(array) + sum(map(size_of, array.flatten()))
    if types.is_fixed_size_list(kind):
        return len(array) + size_of(array.flatten())
    if types.is_list(kind) or types.is_large_list(kind) or types.is_map(kind):
        start, end = (array.offsets[at].as_py() for at in (0, -1)) if len(array) else (0, 0)
        inner = (array.keys, array.items) if types.is_map(kind) else (array.values,)
        return len(array) + sum(size_of(one.slice(start, end - start)) for one in inner)
    if types.is_dictionary(kind):
        used = array.indices.dictionary_encode()  # each value is looked at once
        lengths = _lengths(array.dictionary.take(used.dictionary))
        letters = None if lengths is None else lengths.take(used.indices)
    else:
        letters = _lengths(array)
    return len(array) + (0 if letters is None else int(compute.sum(letters).as_py() or 0))


def _lengths(array: Any) -> Any:
    """Letters or bytes of each text of an array; None for numbers."""
    kind = array.type
    if types.is_string_view(kind) or types.is_binary_view(kind):
        views = np.frombuffer(array.buffers()[1], np.int32)[::4]
        return pyarrow.array(views[array.offset : array.offset + len(array)], pyarrow.int64())
    if any(is_text(kind) for is_text in TEXTS):
        return compute.cast(compute.binary_length(array), pyarrow.int64())
    if types.is_nested(kind) or types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        raise ValueError(f"values of type {str(kind)[:80]} are not read")
    return None


TEXTS = (
    *(types.is_string, types.is_large_string, types.is_binary, types.is_large_binary),
    types.is_fixed_size_binary,
)


def parquet_rows(path: Path | ForeignPath | RemoteFile, start: int = 0) -> Iterator[Fields]:
    """Rows of a parquet file from position ``start`` on; row groups before it are not read."""
    with ExitStack() as opened:
        place: Any = opened.enter_context(path.open("rb"))
        pages = None if isinstance(path, RemoteFile) else place  # there each header is a request
        name = place if pages is None else f"/proc/self/fd/{pages.fileno()}"
        groups = row_groups(place)  # before pyarrow reads a footer of any size
        whole = pyarrow.parquet.ParquetFile(name, buffer_size=BUFFER, pre_buffer=False)
        file = opened.enter_context(whole)
        columns = range(file.metadata.num_columns)
        repeated = [file.schema.column(one).max_repetition_level > 0 for one in columns]
        for number, group in enumerate(groups):
            if start >= group[ROWS]:
                start -= group[ROWS]
                continue
            page = refuse_large_group(group, repeated, pages)
            rows = 1 if page > 2 * MAX_ROW_BYTES else FEW
            yield from _rows(file.iter_batches(batch_size=rows, row_groups=[number]), start)
            start = 0


def parquet_length(path: ForeignPath) -> int:
    """The number of rows of a parquet file."""
    with path.open("rb") as file:
        row_groups(file)
        return int(pyarrow.parquet.read_metadata(file).num_rows)


def datasets_rows(folder: ForeignPath, start: int = 0) -> Iterator[Fields]:
    """Rows of a directory that ``Dataset.save_to_disk`` wrote, from position ``start`` on.

    ValueError for any other directory.
    """
    yield from _rows(_batches(folder), start)


def _batches(folder: ForeignPath) -> Iterator[pyarrow.RecordBatch]:
    for file in _files(folder):
        with file.held() as name, pyarrow.memory_map(name) as source:
            refuse_compressed(pyarrow.ipc.MessageReader.open_stream(source))
            source.seek(0)
            stream = pyarrow.ipc.open_stream(source)
            for batch in stream:
                batch.validate(full=True)
                for at in range(0, batch.num_rows, AT_A_TIME):
                    yield batch.slice(at, AT_A_TIME)


def _rows(batches: Iterable[pyarrow.RecordBatch], start: int) -> Iterator[Fields]:
    """One after the other, where all at once would be as large as a long value times its rows."""
    for batch in batches:
        rows = batch.slice(min(start, batch.num_rows)).to_struct_array()
        start -= batch.num_rows - len(rows)
        if is_small(rows, SMALL):
            yield from rows.to_pylist()
            continue
        for at in range(len(rows)):
            row = rows.slice(at, 1)
            yield row[0].as_py() if is_small(row, MAX_ROW_BYTES) else None


def _files(folder: ForeignPath) -> list[ForeignPath]:
    """The files with rows; each lies in the folder itself."""
    if (folder / "dataset_dict.json").is_file():
        splits = [one.name for one in folder.entries() if (one / "state.json").is_file()]
        raise ValueError(f"it holds splits {splits}: name one, as in {folder}/train")
    content = (folder / "state.json").read(MAX_STATE_BYTES)
    names = [str(entry["filename"]) for entry in json.loads(content)["_data_files"]]
    for name in names:
        if "/" in name or not (folder / name).is_file():
            raise ValueError(f"its state.json names {name[:200]!r}, not a file of the folder")
    if len(set(names)) < len(names):
        raise ValueError("its state.json names a file twice")
    return [folder / name for name in names]
