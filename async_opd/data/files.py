"""Prompts from files: jsonl, parquet, and directories of Hugging Face ``datasets``."""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from async_opd.core.errors import SourceError
from async_opd.core.row import Row
from async_opd.data.fields import MAX_ROW_BYTES, RowSource, too_large

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig


class FileSource(RowSource):
    """Prompts from a jsonl or parquet file, or from a Hugging Face ``datasets`` directory."""

    kind: Literal["file"] = "file"
    path: str = Field(min_length=1)
    """``*.jsonl``, ``*.parquet``, or a directory written by ``Dataset.save_to_disk``. Relative
    paths are relative to the config file."""

    @property
    def label(self) -> str:
        """The path."""
        return self.path

    def rows(self, index: int, data: DataConfig, start: int = 0) -> Iterator[Row | SourceError]:
        """See PromptSource.rows; in jsonl a row's number is that of its line, from 0."""
        path = Path(self.path)
        if not os.path.exists(path):
            raise SourceError(str(path), "does not exist")
        if not (path.is_file() or path.is_dir()):
            raise SourceError(str(path), "is no file")  # reading a pipe might never end
        try:
            for number, entry in _entries(path, start):
                try:
                    fields = _parsed(entry) if isinstance(entry, str) else entry
                    yield self.row(fields, f"{index}:{number}", data)
                except ValueError as error:
                    yield SourceError(str(path), str(error), number + 1)
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(str(path), f"cannot be read: {error}") from error


def _entries(path: Path, start: int) -> Iterator[tuple[int, str | dict[str, Any]]]:
    """Lines or fields, with their numbers from 0."""
    if path.suffix == ".jsonl":
        yield from islice(_lines(path), start, None)
    elif path.suffix == ".parquet":
        yield from enumerate(_arrow(path, start, "is no valid parquet"), start)
    elif path.is_dir():
        yield from enumerate(_arrow(path, start, "is no datasets directory"), start)
    else:
        raise SourceError(str(path), "is neither *.jsonl, *.parquet nor a datasets directory")


def _arrow(path: Path, start: int, fault: str) -> Iterator[dict[str, Any]]:
    from async_opd.data.arrow_rows import datasets_rows, parquet_rows

    try:
        yield from (parquet_rows if path.suffix == ".parquet" else datasets_rows)(path, start)
    except Exception as error:  # broken files find their way deep into pyarrow
        raise SourceError(str(path), f"{fault}: {type(error).__name__}: {error}") from error


def _lines(path: Path) -> Iterator[tuple[int, str]]:
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
