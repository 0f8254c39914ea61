"""Prompts from files: jsonl, parquet, and directories of Hugging Face ``datasets``.

jsonl and parquet may be behind a URL; then they are read as they come, and nothing is kept of them.

Nothing in rows of parquet files and ``datasets`` directories is decoded: an image or a sound stays
its bytes and its path, no file outside of the folder is opened and no URL fetched. A row that would
be too large is None. Their readers raise whatever a broken file makes pyarrow raise.
"""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import pyarrow
import pyarrow.ipc
import pyarrow.parquet
from pydantic import Field

from async_opd.config.paths import is_url
from async_opd.core.errors import SourceError
from async_opd.core.row import Row
from async_opd.data.arrow_sizes import (
    ROWS,
    is_small,
    refuse_compressed,
    refuse_large_group,
    row_groups,
)
from async_opd.data.fields import MAX_ROW_BYTES, RowSource, too_large
from async_opd.files.foreign import ForeignPath
from async_opd.files.remote import RemoteFile, only_os_errors

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig

RowFile = Path | ForeignPath | RemoteFile
"""A file that a config names, one of a data set's folder, or one at a URL."""


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


class FileSource(RowSource):
    """Prompts from a jsonl or parquet file, or from a Hugging Face ``datasets`` directory."""

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """``*.jsonl``, ``*.parquet``, or a directory written by ``Dataset.save_to_disk``. Relative
    paths are relative to the config file; a URL (``s3://bucket/train.jsonl``) is read by fsspec."""

    @property
    def label(self) -> str:
        """The path."""
        return self.path

    def rows(self, index: int, data: DataConfig, start: int = 0) -> Iterator[Row | SourceError]:
        """See PromptSource.rows; in jsonl a row's number is that of its line, from 0."""
        if is_url(self.path):
            yield from self._remote_rows(index, data, start)
            return
        path = Path(self.path)
        if not os.path.exists(path):
            raise SourceError(str(path), "does not exist")
        if not (path.is_file() or path.is_dir()):
            raise SourceError(str(path), "is no file")  # reading a pipe might never end
        yield from file_rows(self, path, index, data, start)

    def _remote_rows(self, index: int, data: DataConfig, start: int) -> Iterator[Row | SourceError]:
        file = RemoteFile(self.path)
        if file.suffix not in (".jsonl", ".parquet"):
            message = "is neither *.jsonl nor *.parquet: other data must be on this machine"
            raise SourceError(self.path, message)
        try:
            if not file.exists():
                raise SourceError(self.path, "does not exist")
            with only_os_errors(self.path):
                yield from file_rows(self, file, index, data, start)
        except OSError as error:
            raise SourceError(self.path, f"cannot be read: {error}") from error


def file_rows(
    source: RowSource,
    path: RowFile,
    index: int,
    data: DataConfig,
    start: int = 0,
    before: int = 0,
) -> Iterator[Row | SourceError]:
    """The rows of a source's file from position ``start`` on; see PromptSource.rows.

    ``before`` is added to their numbers. SourceError if the file cannot be read.
    """
    folder = None
    if isinstance(path, Path):
        folder = path if path.is_dir() else path.parent
    elif isinstance(path, ForeignPath):
        folder = path.parent.as_path()
    try:
        for number, entry in _entries(path, start):
            try:
                if entry is None:
                    raise ValueError(too_large())
                fields = _parsed(entry) if isinstance(entry, str) else entry
                yield source.row(fields, f"{index}:{before + number}", data, folder)
            except ValueError as error:
                yield SourceError(str(path), str(error), before + number + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(str(path), f"cannot be read: {error}") from error


def rows_and_numbers(path: ForeignPath) -> tuple[int, int]:
    """How many rows a jsonl or parquet file has, and how many numbers they take: blank lines do.

    Raises whatever a broken file makes pyarrow raise.
    """
    if path.suffix == ".parquet":
        return (parquet_length(path),) * 2
    rows = last = 0
    for last, _ in _lines(path):  # noqa: B007
        rows += 1
    return rows, last + 1


def _entries(path: RowFile, start: int) -> Iterator[tuple[int, str | dict[str, Any] | None]]:
    """Lines or fields, with their numbers from 0; None for fields that are too large."""
    if path.suffix == ".jsonl":
        yield from islice(_lines(path), start, None)
    elif path.suffix == ".parquet":
        yield from enumerate(_arrow(path, start, "is no valid parquet"), start)
    elif isinstance(path, Path) and path.is_dir():
        yield from enumerate(_arrow(path, start, "is no datasets directory"), start)
    else:
        raise SourceError(str(path), "is neither *.jsonl, *.parquet nor a datasets directory")


def _arrow(path: RowFile, start: int, fault: str) -> Iterator[dict[str, Any] | None]:
    try:
        if isinstance(path, Path) and path.suffix != ".parquet":
            yield from datasets_rows(ForeignPath(path, own_links=True), start)
        else:
            yield from parquet_rows(path, start)
    except Exception as error:  # broken files find their way deep into pyarrow
        raise SourceError(str(path), f"{fault}: {type(error).__name__}: {error}") from error


def _lines(path: RowFile) -> Iterator[tuple[int, str]]:
    """Lines that are not blank; of one that is too large the beginning."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), "")):
            if line.strip():
                yield number, line
            while len(line) > MAX_ROW_BYTES and not line.endswith("\n"):
                line = file.readline(MAX_ROW_BYTES + 1)


def _parsed(line: str) -> dict[str, Any]:
    """The fields of a line. ValueError if it is too large, or no JSON object."""
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(too_large())
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is no JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"is {type(fields).__name__}, not an object")
    return fields
