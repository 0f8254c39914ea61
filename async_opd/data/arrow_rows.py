"""Rows of parquet files and of Hugging Face ``datasets`` directories, as they lie in the files.

Nothing in them is decoded: an image or a sound stays its bytes and its path, no file outside of the
folder is opened and no URL fetched. A row that would be too large is None.
Raises whatever a broken file makes pyarrow raise.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.ipc
import pyarrow.parquet

from async_opd.data.arrow_sizes import (
    ROWS,
    is_small,
    refuse_compressed,
    refuse_large_group,
    row_groups,
)
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


def parquet_rows(path: Path | ForeignPath | RemoteFile, start: int = 0) -> Iterator[Fields]:
    """Rows of a parquet file from position ``start`` on; row groups before it are not read."""
    with ExitStack() as opened:
        place: Any = opened.enter_context(path.open("rb"))
        pages = None if isinstance(path, RemoteFile) else place  # there each header is a request
        name = place if pages is None else f"/proc/self/fd/{pages.fileno()}"
        whole = pyarrow.parquet.ParquetFile(name, buffer_size=BUFFER, pre_buffer=False)
        file = opened.enter_context(whole)
        groups = row_groups(place)
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
