"""The rows of a ``.wandb`` file: for wandb 0.31, which has no reader.

A header of 7 bytes, then records in blocks of 32 KiB, as in a LevelDB log: checksum (4 bytes),
length (2), kind (1), content. Kind 1 is a whole record, 2, 3 and 4 are first, middle and last parts
of one. Where less than 7 bytes are left in a block, the next record begins in the next one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEAD = 1 << 15, 7
WHOLE, LAST = 1, 4


def rows(path: Path) -> list[dict[str, Any]]:
    """The logged rows, in order; ``_step`` is wandb's own step."""
    found = (Record.FromString(content) for content in _records(path.read_bytes()))
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in items}
        for record in found
        if (items := record.history.item)
    ]


def config(path: Path) -> dict[str, Any]:
    """The run's config, as wandb was first given it."""
    found = (Record.FromString(content) for content in _records(path.read_bytes()))
    return {
        item.key: json.loads(item.value_json)
        for record in found
        for item in record.run.config.update
    }


def alerts(path: Path) -> list[tuple[str, str]]:
    """Titles and texts of the alerts, in order."""
    found = (Record.FromString(content) for content in _records(path.read_bytes()))
    return [(one.alert.title, one.alert.text) for one in found if one.HasField("alert")]


def table_files(path: Path) -> dict[str, dict[str, Path]]:
    """The files of each table's artifact by name, where wandb keeps them for a later upload."""
    found = (Record.FromString(content) for content in _records(path.read_bytes()))
    artifacts = [record.artifact for record in found if record.HasField("artifact")]
    return {
        one.name: {entry.path: Path(entry.local_path) for entry in one.manifest.contents}
        for one in artifacts
        if one.type == "run_table"
    }


def axes(path: Path) -> dict[str, str]:
    """The x axis of each metric, or pattern of metrics, that has one."""
    found = (Record.FromString(content) for content in _records(path.read_bytes()))
    metrics = [record.metric for record in found if record.HasField("metric")]
    return {one.name or one.glob_name: one.step_metric for one in metrics if one.step_metric}


def _records(data: bytes) -> Iterator[bytes]:
    at, parts = HEAD, b""
    while at + HEAD <= len(data):
        if (left := BLOCK - at % BLOCK) < HEAD:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        parts += data[at + HEAD : at + HEAD + length]
        at += HEAD + length
        if kind in (WHOLE, LAST):
            yield parts
            parts = b""
