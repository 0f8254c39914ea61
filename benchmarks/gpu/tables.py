"""Writes the figures of ``benchmarks.gpu.all`` into a document, as tables.

    python -m benchmarks.gpu.tables DIR/gpu.json [docs/gpu.md]

replaces what stands between the lines BEGIN and END there. A cell without figures has its reason in
the last column; ``unmeasured`` lists them all, so that the document names what did not run. Prints
how many cells there are, and how many of them have no figures, as one JSON line.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
REASONS = ("skipped", "out_of_memory", "failed")
Cell = dict[str, Any]


def document(results: dict[str, Any]) -> str:
    """All tables, one part for each script."""
    parts = [part(name, result) for name, result in results.items()]
    missing = unmeasured(results)
    if missing:
        parts.append("\n".join(["**Did not run**\n", *(f"- {line}" for line in missing)]))
    return "\n\n".join(parts)


def part(name: str, result: dict[str, Any]) -> str:
    """A script's device, versions and tables."""
    head = f"**`python -m benchmarks.gpu.{name}`**"
    if "versions" in result:
        versions = ", ".join(f"{key} {value}" for key, value in result["versions"].items())
        memory = result.get("device_gib")
        device = result["device_name"] + (f" ({memory} GiB)" if memory else "")
        head += f": {device}, {result['date']}; {versions}"
    if result["ended"] != "done":
        head += f" ({result['ended']})"
    kinds: dict[str, list[Cell]] = {}
    for cell in result["cells"]:
        kinds.setdefault(cell.get("what", ""), []).append(cell)
    return "\n\n".join([head, *map(table, kinds.values())])


def table(cells: Sequence[Cell]) -> str:
    """A row for each cell, a column for each name, in the order they come."""
    hidden = (*REASONS, "what")
    columns = [key for key in _once(key for cell in cells for key in cell) if key not in hidden]
    noted = any(reason(cell) for cell in cells)
    rows = [[*columns, "note"] if noted else columns]
    for cell in cells:
        values = [_shown(cell.get(column)) for column in columns]
        rows.append([*values, reason(cell)] if noted else values)
    rows.insert(1, ["---"] * len(rows[0]))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def reason(cell: Cell) -> str:
    """Why a cell has no figures; empty if it has some."""
    found = [f"{key.replace('_', ' ')}: {cell[key]}" for key in REASONS if key in cell]
    return "; ".join(found).replace("|", "/").replace("\n", " ")


def unmeasured(results: dict[str, Any]) -> list[str]:
    """A line for each script that did not end, and for each cell without figures."""
    lines = []
    for name, result in results.items():
        if result["ended"] != "done":
            lines.append(f"{name}: {result['ended']}")
        for cell in result["cells"]:
            if reason(cell):
                what = ", ".join(f"{k} {v}" for k, v in cell.items() if k not in REASONS)
                lines.append(f"{name}, {what}: {reason(cell)}")
    return lines


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
    made.add_argument("results", type=Path)
    made.add_argument("document", type=Path, nargs="?", default=Path("docs/gpu.md"))
    options = made.parse_args(arguments)
    results = json.loads(options.results.read_text())
    options.document.write_text(written(options.document.read_text(), document(results)))
    cells = [cell for result in results.values() for cell in result["cells"]]
    unmeasured = sum(bool(reason(cell)) for cell in cells)
    print(json.dumps({"scripts": len(results), "cells": len(cells), "unmeasured": unmeasured}))


if __name__ == "__main__":
    main()
