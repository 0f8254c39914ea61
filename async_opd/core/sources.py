"""Rows of prompts from files and generators, as they are, before tokenization."""

from __future__ import annotations

import json
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
    """One entry. ``uid`` is ``<source>:<0-based index>``; ``fields`` is everything it had."""

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
    if not path.exists():
        raise SourceError(str(path), "does not exist")
    rows = [
        _row(fields, f"{index}:{at}", at + 1, path, data) for at, fields in enumerate(_read(path))
    ]
    if not rows:
        raise SourceError(str(path), "has no rows")
    return rows


def _read(path: Path) -> Iterator[dict[str, Any]]:
    if path.suffix == ".jsonl":
        yield from _jsonl(path)
    elif path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        try:
            yield from parquet.read_table(path).to_pylist()
        except (OSError, ValueError) as error:
            raise SourceError(str(path), f"is no valid parquet: {error}") from error
    elif path.is_dir():
        yield from _datasets(path)
    else:
        raise SourceError(str(path), "is neither *.jsonl, *.parquet nor a datasets directory")


def _jsonl(path: Path) -> Iterator[dict[str, Any]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except ValueError as error:
                raise SourceError(str(path), f"is no JSON: {error}", number) from error
            if not isinstance(fields, dict):
                raise SourceError(str(path), f"is {type(fields).__name__}, not an object", number)
            yield fields


def _datasets(path: Path) -> Iterator[dict[str, Any]]:
    import datasets

    try:
        loaded = datasets.load_from_disk(str(path))
    except (OSError, ValueError) as error:
        raise SourceError(str(path), f"is no datasets directory: {error}") from error
    if isinstance(loaded, datasets.DatasetDict):
        raise SourceError(str(path), f"holds splits {sorted(loaded)}: name one, as in {path}/train")
    yield from (dict(row) for row in loaded)


def _row(fields: dict[str, Any], uid: str, number: int, path: Path, data: DataConfig) -> Row:
    for name in (data.prompt, data.route_by):
        if fields.get(name) in (None, "", []):
            raise SourceError(
                str(path), f"has no field {name!r}; it has {', '.join(map(repr, fields))}", number
            )
    answer = fields.get(data.answer)
    return Row(
        uid=uid,
        data_source=str(fields[data.route_by]),
        prompt=fields[data.prompt],
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
            fields={"reasoning_gym": source.task, **entry},
        )
