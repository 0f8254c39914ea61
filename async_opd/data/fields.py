"""From the fields of an entry to a row, by the names that the config gives."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from async_opd.core.nesting import MAX_DEPTH
from async_opd.core.row import Row

if TYPE_CHECKING:
    from async_opd.config.sections.data import DataConfig

MAX_ROW_BYTES = 16 << 20
"""Letters and bytes of a row, images of it included."""
MAX_NAMED = 12


def row_of(fields: dict[str, Any], uid: str, data: DataConfig) -> Row:
    """The row of an entry. ValueError if the entry is too large, or has no prompt."""
    excess = _excess(fields)
    if excess is not None:
        raise ValueError(excess)
    for name in (data.prompt, data.route_by):
        if fields.get(name) in (None, "", []):
            raise ValueError(f"has no field {name!r}; it has {_names(fields)}")
    prompt = fields[data.prompt]
    chat = isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)
    if not chat and not isinstance(prompt, str):
        kind = type(prompt).__name__
        raise ValueError(f"{data.prompt!r} is {kind}, neither text nor chat messages")
    answer = fields.get(data.answer)
    return Row(
        uid=uid,
        data_source=str(fields[data.route_by]),
        prompt=prompt,
        answer=None if answer is None else str(answer),
        fields=fields,
    )


def too_large() -> str:
    """What is wrong with an entry of more than ``MAX_ROW_BYTES``."""
    return f"is too large: more than {MAX_ROW_BYTES >> 20} MiB"


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
            return too_large()
        level = inner
    return None


def _names(fields: dict[str, Any]) -> str:
    """Some of the fields' names."""
    names = [repr(str(name)[:40]) for name in list(fields)[:MAX_NAMED]]
    return ", ".join([*names, "…"] if len(fields) > MAX_NAMED else names)
