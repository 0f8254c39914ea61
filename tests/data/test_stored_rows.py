"""Rows on disk: any of them by its position, none in memory, in the order that lists had."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.core.row import Row
from async_opd.data import stored_rows
from async_opd.data.files import FileSource
from async_opd.data.prompts import PromptStream
from async_opd.data.stored_rows import StoredRows, read_source
from tests.properties import examples

DATA = DataConfig(train=[])


def stored(count: int) -> StoredRows:
    rows = StoredRows()
    for number in range(count):
        rows.append(Row(f"0:{number}", "a", f"p{number}", None, {"image": b"\x00" * number}))
    return rows


@examples(30)
@given(st.integers(1, 40), st.integers(-45, 45))
def test_a_row_is_found_by_its_position_as_in_a_list(count: int, at: int) -> None:
    rows, numbers = stored(count), [f"0:{number}" for number in range(count)]
    assert [row.uid for row in rows] == numbers
    assert [row.uid for row in rows[at:]] == numbers[at:]
    if -count <= at < count:
        assert rows[at].uid == numbers[at]
    else:
        with pytest.raises(IndexError):
            rows[at]
    rows.append(Row("0:more", "a", "p", None, {}))  # after what was read
    assert [row.uid for row in rows] == [*numbers, "0:more"]


@examples(30)
@given(st.integers(1, 60), st.integers(0, 9), st.integers(0, 150))
def test_the_order_is_of_a_list_shuffled_by_seed_and_epoch(
    count: int, seed: int, taken: int
) -> None:
    """Checkpoints of runs whose rows lay in lists go on with the prompts they would have had."""
    stream = PromptStream([stored(count)], [1.0], lambda _: [1], lambda s: s, seed=seed)
    epochs = []
    for epoch in range(taken // count + 1):
        order = list(range(count))
        random.Random(f"{seed}/0/{epoch}").shuffle(order)
        epochs += [f"0:{number}#{epoch}" for number in order]
    assert [prompt.uid for prompt in stream.next(taken)] == epochs[:taken]  # type: ignore[union-attr]


@examples(30)
@given(st.lists(st.integers(0, 200), unique=True, min_size=1, max_size=50), st.integers(0, 200))
def test_a_prompt_is_found_by_its_uid_despite_gaps(numbers: list[int], wanted: int) -> None:
    rows = StoredRows()
    for number in sorted(numbers):
        rows.append(Row(f"0:{number}", "a", f"p{number}", None, {}))
    stream = PromptStream([rows], [1.0], lambda _: [1], lambda s: s, seed=0)
    if wanted in numbers:
        assert stream.find(f"0:{wanted}#3").uid == f"0:{wanted}#3"
    else:
        with pytest.raises(KeyError, match=f"0:{wanted}#3"):
            stream.find(f"0:{wanted}#3")


@pytest.mark.parametrize("uid", ["7:0#0", "x", "0:x#0", "", "0:0#x"])
def test_a_uid_that_no_source_gave_is_a_key_error(uid: str) -> None:
    stream = PromptStream([stored(2)], [1.0], lambda _: [1], lambda s: s, seed=0)
    with pytest.raises(KeyError):
        stream.find(uid)


def test_rows_without_room_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "a", "data_source": "s"}\n')

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(stored_rows.pickle, "dump", full)
    with pytest.raises(SourceError, match=r"No space left.*set TMPDIR, or stream the source"):
        read_source(FileSource(path=str(tmp_path / "a.jsonl")), 0, DATA)


# ── memory ────────────────────────────────────────────────────────────────────────────────────

ROWS = 50_000
ROOM = 90 << 20
"""Bytes of private memory; the files hold 173 MiB and more."""

LOOK = """
import sys, threading
import pyarrow, pyarrow.parquet
from async_opd.config.sections.data import DataConfig
from async_opd.data.prompts import PromptStream
from async_opd.data.files import FileSource
from async_opd.data.stored_rows import read_source
from async_opd.data.streamed_rows import StreamedRows

def private():
    with open("/proc/self/status") as file:
        return 1024 * int(next(line for line in file if line.startswith("RssAnon")).split()[1])

seen = highest = 0
def look(row):
    global seen, highest
    seen += 1
    if seen % 1000 == 0:
        highest = max(highest, private())

source, data, before = FileSource(path=sys.argv[1]), DataConfig(train=[]), private()
if sys.argv[2] == "stored":
    rows = read_source(source, 0, data, look)
else:
    rows = StreamedRows(lambda start: source.rows(0, data, start), 2048)
stream = PromptStream([rows], [1.0], lambda text: [1], lambda name: name, seed=0)
for _ in range(int(sys.argv[3])):
    look(stream.next(1))
print(seen, highest - before)
"""


def jsonl(path: Path) -> Path:
    with (path / "rows.jsonl").open("w") as file:
        for number in range(ROWS):
            file.write(json.dumps(entry(number)) + "\n")
    return path / "rows.jsonl"


def parquet(path: Path) -> Path:
    import pyarrow
    import pyarrow.parquet

    table = pyarrow.Table.from_pylist([entry(number) for number in range(ROWS)])
    how: Any = {"row_group_size": ROWS, "compression": "none"}
    pyarrow.parquet.write_table(table, path / "rows.parquet", **how)
    return path / "rows.parquet"


def entry(number: int) -> dict[str, str]:
    return {"prompt": f"{number}" + "x" * 3600, "data_source": "a", "answer": str(number)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("write", "how"), [(jsonl, "stored"), (jsonl, "streamed"), (parquet, "stored")]
)
def test_a_large_file_stays_on_disk(
    tmp_path: Path, write: Callable[[Path], Path], how: str
) -> None:
    """One row group holds the parquet's rows; every row is read, or taken as a prompt."""
    file, taken = write(tmp_path), 5000 if how == "stored" else ROWS
    assert file.stat().st_size > 1.5 * ROOM
    command = [sys.executable, "-c", LOOK, str(file), how, str(taken)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    seen, memory = map(int, done.stdout.split())
    assert seen == (ROWS + taken if how == "stored" else ROWS)
    assert memory < ROOM
