"""Rows of prompts from files and generators, as they are, before tokenization."""

from __future__ import annotations

import json
import os.path
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from async_opd.config.run_config import DataConfig, FileSource, ReasoningGymSource
from async_opd.core.errors import AsyncOPDError
from async_opd.core.nesting import MAX_DEPTH
from async_opd.core.row import Row, Task

MAX_ROW_BYTES = 16 << 20
"""Letters and bytes of a row, images of it included."""
MAX_NAMED = 12


class SourceError(AsyncOPDError):
    """A data source that cannot be read. ``row`` is 1-based, or None for the whole source."""

    def __init__(self, source: str, message: str, row: int | None = None) -> None:
        super().__init__(source, message, row)
        self.source, self.message, self.row = source, message, row

    def __str__(self) -> str:
        return f"{self.source}{'' if self.row is None else f', row {self.row}'}: {self.message}"


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
        yield from enumerate(_arrow(path, "is no valid parquet"), 1)
    elif path.is_dir():
        yield from enumerate(_arrow(path, "is no datasets directory"), 1)
    else:
        raise SourceError(str(path), "is neither *.jsonl, *.parquet nor a datasets directory")


def _arrow(path: Path, fault: str) -> Iterator[dict[str, Any]]:
    from async_opd.data.arrow_rows import datasets_rows, parquet_rows

    try:
        yield from parquet_rows(path) if path.suffix == ".parquet" else datasets_rows(path)
    except Exception as error:  # broken files find their way deep into pyarrow
        raise SourceError(str(path), f"{fault}: {type(error).__name__}: {error}") from error


def _jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(iter(lambda: file.readline(MAX_ROW_BYTES + 1), ""), 1):
            if len(line) > MAX_ROW_BYTES:
                raise SourceError(str(path), _too_large(), number)
            if not line.strip():
                continue
            try:
                fields = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise SourceError(str(path), f"is no JSON: {error}", number) from error
            if not isinstance(fields, dict):
                raise SourceError(str(path), f"is {type(fields).__name__}, not an object", number)
            yield number, fields


def _excess(fields: dict[str, Any]) -> str | None:
    """What is too much in a row: it is pickled, rendered and graded as a whole."""
    size, level, depth = 0, [fields], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            return f"is nested too deeply: more than {MAX_DEPTH} values inside of each other"
        inner: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                inner += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                inner += value
            size += len(value) if isinstance(value, str | bytes) else 1
        if size > MAX_ROW_BYTES:
            return _too_large()
        level = inner
    return None


def _too_large() -> str:
    return f"is too large: more than {MAX_ROW_BYTES >> 20} MiB"


def _row(fields: dict[str, Any], uid: str, number: int, path: Path, data: DataConfig) -> Row:
    excess = _excess(fields)
    if excess is not None:
        raise SourceError(str(path), excess, number)
    for name in (data.prompt, data.route_by):
        if fields.get(name) in (None, "", []):
            raise SourceError(str(path), f"has no field {name!r}; it has {_names(fields)}", number)
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


def _names(fields: dict[str, Any]) -> str:
    """Some of the fields' names."""
    names = [repr(str(name)[:40]) for name in list(fields)[:MAX_NAMED]]
    return ", ".join([*names, "…"] if len(fields) > MAX_NAMED else names)


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
            fields=entry,
            task=Task(source.task, source.options),
        )
