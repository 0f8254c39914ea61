"""Writes the tables of docs/import.md from those of ``async_opd.tools.importing``."""

from __future__ import annotations

from pathlib import Path

from async_opd.tools.importing.entries import UNSTATED, Entry, Meaningless, To
from async_opd.tools.importing.frameworks import FRAMEWORKS

FILE = Path(__file__).parent / "import.md"
MARK = "<!-- tables, by python docs/make_import.py -->\n"


def cells(entry: Entry) -> tuple[str, str]:
    """The use of a key, and its default there if a missing key is written out."""
    if isinstance(entry, Meaningless):
        return f"no meaning here: {entry.reason}", ""
    if not isinstance(entry, To):
        remark = not any(mark in entry.keys for mark in "._<") and " " in entry.keys
        return (entry.keys if remark else f"`{entry.keys}`, with other keys"), ""
    return f"`{entry.key}`", "" if entry.default is UNSTATED else f"`{entry.default!r}`"


def tables() -> str:
    """One table for each framework."""
    parts = []
    for framework in FRAMEWORKS.values():
        rows = [
            f"| `{key}` | {' | '.join(cells(entry))} |" for key, entry in framework.table.items()
        ]
        head = "| key there | here | its default |\n|---|---|---|"
        parts.append("\n".join([f"### {framework.name}", head, *rows]))
    return "\n\n".join(parts) + "\n"


def document() -> str:
    """The document with its tables made anew."""
    return FILE.read_text().partition(MARK)[0] + MARK + "\n" + tables()


if __name__ == "__main__":
    FILE.write_text(document())
