"""Prompts from files: jsonl, parquet, and directories of Hugging Face ``datasets``.

jsonl and parquet may be behind a URL; then they are read as they come, and nothing is kept of them.
"""

from __future__ import annotations

import json
import os.path
import shlex
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from async_opd.config.paths import is_url
from async_opd.core.errors import RowFault, SourceError, in_words
from async_opd.core.row import Row
from async_opd.data.fields import MAX_ROW_BYTES, RowSource, row_error, too_large
from async_opd.files.absent import nearest
from async_opd.files.foreign import ForeignPath
from async_opd.files.remote import RemoteFile, only_os_errors

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig


CONVERT = {
    ".csv": (
        "python -c 'import csv, json, sys; [print(json.dumps(row)) for row in "
        "csv.DictReader(sys.stdin)]' < {0} > rows.jsonl"
    ),
    ".tsv": (
        "python -c 'import csv, json, sys; [print(json.dumps(row)) for row in "
        'csv.DictReader(sys.stdin, delimiter="\t")]\' < {0} > rows.jsonl'
    ),
    ".json": (
        "python -c 'import json, sys; [print(json.dumps(row)) for row in json.load(sys.stdin)]' "
        "< {0} > rows.jsonl"
    ),
    ".gz": "gunzip --keep {0}",
}
"""A command that turns a file into jsonl, by the end of its name."""
UTF_16 = ("\udcff\udcfe", "\udcfe\udcff")
"""How lines of UTF-16 begin, whose bytes are not UTF-8."""

RowFile = Path | ForeignPath | RemoteFile
"""A file that a config names, one of a data set's folder, or one at a URL."""


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
            raise SourceError(str(path), "does not exist", remedy=_elsewhere(path))
        if not (path.is_file() or path.is_dir()):
            raise SourceError(str(path), "is not a file")  # reading a pipe might never end
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


def _elsewhere(path: Path) -> str:
    """The remedy for a path that does not exist: one from the working directory, or a similar one.

    A relative path was joined to the config's folder: its last parts may be one from here.
    """
    parts = path.parts
    for at in range(1, len(parts)):
        if os.path.exists(here := os.path.join(*parts[at:])):
            way = os.path.relpath(here, os.path.join(*parts[:at]))
            return f"paths are relative to the config's folder: write {way}"
    return nearest(path)


def file_rows(
    source: RowSource, path: RowFile, index: int, data: DataConfig, start: int = 0, before: int = 0
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
                yield row_error(str(path), error, before + number + 1)
    except OSError as error:
        raise SourceError(str(path), f"cannot be read: {error}") from error


def rows_and_numbers(path: ForeignPath) -> tuple[int, int]:
    """How many rows a jsonl or parquet file has, and how many numbers they take: blank lines do.

    Raises whatever a broken file makes pyarrow raise.
    """
    if path.suffix == ".parquet":
        from async_opd.data.arrow_rows import parquet_length

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
        yield from enumerate(_arrow(path, start, "is not valid parquet"), start)
    elif isinstance(path, Path) and path.is_dir():
        yield from enumerate(_arrow(path, start, "is not a datasets directory"), start)
    else:
        how = CONVERT.get(path.suffix, "").format(shlex.quote(str(path)))
        remedy = f"convert it: {how}" if how else "write it as jsonl or parquet"
        message = "is neither *.jsonl, *.parquet nor a datasets directory"
        raise SourceError(str(path), message, remedy=remedy)


def _arrow(path: RowFile, start: int, fault: str) -> Iterator[dict[str, Any] | None]:
    from async_opd.data.arrow_rows import datasets_rows, parquet_rows

    try:
        if isinstance(path, Path) and path.suffix != ".parquet":
            yield from datasets_rows(ForeignPath(path, own_links=True), start)
        else:
            yield from parquet_rows(path, start)
    except Exception as error:  # broken files find their way deep into pyarrow
        raise SourceError(str(path), f"{fault}: {in_words(error)}") from error


def _lines(path: RowFile) -> Iterator[tuple[int, str]]:
    """Lines that are not blank; of one that is too large the beginning.

    Bytes that are not UTF-8 are lone surrogates in them, which no UTF-8 has.
    """
    with path.open(encoding="utf-8-sig", errors="surrogateescape") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), "")):
            if line.strip():
                yield number, line
            while len(line) > MAX_ROW_BYTES and not line.endswith("\n"):
                line = file.readline(MAX_ROW_BYTES + 1)


def _parsed(line: str) -> dict[str, Any]:
    """The fields of a line. ValueError if it is too large, not UTF-8, or not a JSON object."""
    if len(line) > MAX_ROW_BYTES:
        raise ValueError(too_large())
    try:
        line.encode()
    except UnicodeEncodeError as error:
        is_16 = line.startswith(UTF_16)
        found = "is UTF-16, not UTF-8" if is_16 else f"is not UTF-8 at character {error.start + 1}"
        how = f"iconv -f {'UTF-16' if is_16 else 'LATIN1'} -t UTF-8 FILE > NEW"
        raise RowFault(found, f"save the file as UTF-8: {how}") from error
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"is {type(fields).__name__}, not an object")
    return fields
