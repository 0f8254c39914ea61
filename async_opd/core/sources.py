"""Rows of prompts from files and generators, as they are, before tokenization."""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from async_opd.core.config import DataConfig, FileSource, ReasoningGymSource
from async_opd.core.errors import AsyncOPDError
from async_opd.core.text import PromptText


class SourceError(AsyncOPDError):
    """A data source that cannot be read. ``row`` is 1-based, or None for the whole source."""

    def __init__(self, source: str, message: str, row: int | None = None) -> None:
        super().__init__(source, message, row)
        self.source, self.message, self.row = source, message, row

    def __str__(self) -> str:
        return f"{self.source}{'' if self.row is None else f', row {self.row}'}: {self.message}"


@dataclass(frozen=True)
class Row:
    """One entry. ``uid`` is ``<source>:<0-based index>``, in jsonl that of its line."""

    uid: str
    data_source: str
    prompt: PromptText
    answer: str | None
    fields: dict[str, Any]


def read_source(source: FileSource | ReasoningGymSource, index: int, data: DataConfig) -> list[Row]:
    """All rows of a source. Raises SourceError."""
    if isinstance(source, ReasoningGymSource):
        return list(_reasoning_gym(source, index))
    path = Path(source.path)
    if not os.path.exists(path):
        raise SourceError(str(path), "does not exist")
    if not (path.is_file() or path.is_dir()):
        raise SourceError(str(path), "is no file")  # reading a pipe might never end
    try:
        rows = [
            _row(fields, f"{index}:{number - 1}", number, path, data)
            for number, fields in _read(path)
        ]
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(str(path), f"cannot be read: {error}") from error
    if not rows:
        raise SourceError(str(path), "has no rows")
    return rows


def _read(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Rows with their 1-based numbers."""
    if path.suffix == ".jsonl":
        yield from _jsonl(path)
    elif path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        try:
            rows = parquet.read_table(path).to_pylist()
        except Exception as error:  # broken files find their way deep into it
            raise SourceError(str(path), f"is no valid parquet: {_words(error)}") from error
        yield from enumerate(rows, 1)
    elif path.is_dir():
        yield from enumerate(_datasets(path), 1)
    else:
        raise SourceError(str(path), "is neither *.jsonl, *.parquet nor a datasets directory")


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SourceError(str(path), f"is no JSON: {error}", number) from error
            if not isinstance(fields, dict):
                raise SourceError(str(path), f"is {type(fields).__name__}, not an object", number)
            yield number, fields


def _datasets(path: Path) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
        rows = [] if isinstance(loaded, datasets.DatasetDict) else [dict(row) for row in loaded]
    except Exception as error:  # it trusts its own JSON files
        raise SourceError(str(path), f"is no datasets directory: {_words(error)}") from error
    if isinstance(loaded, datasets.DatasetDict):
        raise SourceError(str(path), f"holds splits {sorted(loaded)}: name one, as in {path}/train")
    yield from rows


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _row(fields: dict[str, Any], uid: str, number: int, path: Path, data: DataConfig) -> Row:
    for name in (data.prompt, data.route_by):
        if fields.get(name) in (None, "", []):
            raise SourceError(
                str(path), f"has no field {name!r}; it has {', '.join(map(repr, fields))}", number
            )
    prompt = fields[data.prompt]
    chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not chat and not isinstance(prompt, str):
        raise SourceError(
            str(path),
            f"{data.prompt!r} is {type(prompt).__name__}, neither text nor chat messages",
            number,
        )
    answer = fields.get(data.answer)
    return Row(
        uid=uid,
        data_source=str(fields[data.route_by]),
        prompt=prompt,
        answer=None if answer is None else str(answer),
        fields=fields,
    )


def _reasoning_gym(source: ReasoningGymSource, index: int) -> Iterator[Row]:
    import reasoning_gym

    try:
        tasks = reasoning_gym.create_dataset(
            source.task, size=source.size, seed=source.seed, **source.options
        )
    except (ValueError, TypeError, AssertionError) as error:
        raise SourceError(f"reasoning_gym {source.task}", str(error)) from error
    for at, entry in enumerate(tasks):
        yield Row(
            uid=f"{index}:{at}",
            data_source=source.task,
            prompt=entry["question"],
            answer=entry["answer"],
            fields={"reasoning_gym": source.task, "reasoning_gym_options": source.options, **entry},
        )
