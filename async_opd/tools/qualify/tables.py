"""Writes the figures of a report of ``async_opd qualify`` into a document, as tables.

    python -m async_opd.tools.qualify.tables report.json [docs/gpu.md]

replaces what stands between the lines BEGIN and END there. A cell without figures has its reason in
the last column; ``unmeasured`` lists them all, so that the document names what did not run. Prints
how many cells there are, and how many of them have no figures, as one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from async_opd.tools.qualify.rows import REASONS, ROWS, Cell, named, reason

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
ROWS_BEGIN, ROWS_END = "<!-- rows: begin -->\n", "\n<!-- rows: end -->"


def rows_table() -> str:
    """The rows of qualify: meaning, needs and criterion of each."""
    head = "| row | shows | minutes, at most | needs | passes if |\n|---|---|---|---|---|\n"
    return head + "\n".join(
        f"| `{name}` | {row.shows} | {row.minutes:g} | {row.needs()} | {row.criterion()} |"
        for name, row in ROWS.items()
    )


def rows_between(text: str) -> str:
    """The table of rows that a document has."""
    return text.partition(ROWS_BEGIN)[2].partition(ROWS_END)[0]


def document(report: dict[str, Any]) -> str:
    """The machine, and all tables, one part for each row."""
    machine = report["machine"]
    memory = f" ({machine['device_gib']} GiB)" if "device_gib" in machine else ""
    versions = ", ".join(f"{key} {value}" for key, value in machine["versions"].items())
    count = machine["gpus"]
    head = f"{count} GPU{'s' * (count != 1)}, {machine['device_name']}{memory}; {versions}"
    parts = [head, *(part(name, row) for name, row in report["rows"].items() if row["cells"])]
    missing = list(unmeasured(report["rows"]))
    if missing:
        parts.append(
            "\n".join(["**Did not run, or did not pass**\n", *map("- {}".format, missing)])
        )
    return "\n\n".join(parts)


def part(name: str, row: dict[str, Any]) -> str:
    """A row's outcome and tables."""
    kinds: dict[str, list[Cell]] = {}
    for cell in row["cells"]:
        kinds.setdefault(cell.get("what", ""), []).append(cell)
    head = f"**`{name}`**: {row['outcome']}, {row['seconds']:g} s, {row['date']}"
    return "\n\n".join([head, *map(table, kinds.values())])


def table(cells: Sequence[Cell]) -> str:
    """A row for each cell, a column for each name, in the order they come."""
    hidden = (*REASONS, "what")
    columns = [key for key in _once(key for cell in cells for key in cell) if key not in hidden]
    noted = any(reason(cell) for cell in cells)
    rows = [[*columns, "note"] if noted else columns]
    for cell in cells:
        values = [_shown(cell.get(column)) for column in columns]
        rows.append([*values, _flat(reason(cell))] if noted else values)
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def unmeasured(rows: dict[str, Any]) -> Iterator[str]:
    """A line for each reason of a row that has not passed, and for each cell without figures."""
    for name, row in rows.items():
        yield from (f"{name}: {row['outcome']}: {_flat(why)}" for why in row["why"])
        for cell in row["cells"]:
            if reason(cell):
                yield f"{name}, {named(cell)}: {_flat(reason(cell))}"


def _flat(text: str) -> str:
    return text.replace("|", "/").replace("\n", " ")


def _once(keys: Iterable[str]) -> list[str]:
    return list(dict.fromkeys(keys))


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def written(text: str, tables: str) -> str:
    """The document with these tables. ValueError if it lacks BEGIN or END."""
    before, begun, rest = text.partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise ValueError(f"the document needs a line {BEGIN} and, below, a line {END}")
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    made.add_argument("report", type=Path)
    made.add_argument("document", type=Path, nargs="?", default=Path("docs/gpu.md"))
    options = made.parse_args(arguments)
    report = json.loads(options.report.read_text())
    text = options.document.read_text()
    text = text.replace(rows_between(text), rows_table())
    options.document.write_text(written(text, document(report)))
    cells = [cell for row in report["rows"].values() for cell in row["cells"]]
    without = sum(bool(reason(cell)) for cell in cells)
    print(json.dumps({"rows": len(report["rows"]), "cells": len(cells), "unmeasured": without}))


if __name__ == "__main__":
    main()
