"""A streamed source: a window of rows in memory, resumed by a cursor, every row once an epoch."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from async_opd.checks.preflight import Inputs, preflight
from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError
from async_opd.core.row import Row
from async_opd.core.samples import NO_TEACHER, DeadLetter, Prompt
from async_opd.data.files import FileSource
from async_opd.data.prompts import PromptStream
from async_opd.data.streamed_rows import KEPT, StreamedRows, number_of
from tests.checks.inputs import config
from tests.data.squares_source import SquaresSource
from tests.properties import examples


class Source:
    """So many rows, ``apart`` numbers from each other; ``asked`` counts those that were read."""

    apart = 1

    def __init__(self, count: int) -> None:
        self.count, self.asked = count, 0

    def read(self, start: int) -> Iterator[Row | SourceError]:
        for position in range(start, self.count):
            self.asked += 1
            number = self.apart * position
            yield Row(f"0:{number}", "a", f"p{number}", None, {})


def stream(
    rows: StreamedRows, cursor: int = 0, shuffle: bool = True, seed: int = 0
) -> PromptStream:
    how: Any = {"seed": seed, "shuffle": shuffle, "cursor": cursor}
    return PromptStream([rows], [1.0], lambda _: [1], teacher, **how)


def teacher(data_source: str) -> str | None:
    return "a" if data_source == "a" else None


def uids(prompts: list[Any]) -> list[str]:
    return [prompt.uid if isinstance(prompt, Prompt) else prompt.header.uid for prompt in prompts]


@examples(60)
@given(st.integers(1, 40), st.integers(1, 12), st.integers(0, 3), st.booleans())
def test_every_row_comes_once_an_epoch(count: int, window: int, seed: int, shuffle: bool) -> None:
    taken = uids(stream(StreamedRows(Source(count).read, window), 0, shuffle, seed).next(3 * count))
    for epoch in range(3):
        part = taken[epoch * count : (epoch + 1) * count]
        assert sorted(part) == sorted(f"0:{number}#{epoch}" for number in range(count))
        if not shuffle:
            assert part == [f"0:{number}#{epoch}" for number in range(count)]


@examples(60)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(0, 90), st.integers(0, 20))
def test_a_stream_goes_on_at_its_cursor(count: int, window: int, before: int, after: int) -> None:
    whole = uids(stream(StreamedRows(Source(count).read, window)).next(before + after))
    resumed = stream(StreamedRows(Source(count).read, window), before)
    assert uids(resumed.next(after)) == whole[before:]


def test_rows_are_shuffled_within_their_window_and_in_each_epoch_anew() -> None:
    source = Source(40)
    made = stream(StreamedRows(source.read, 20))
    assert made.metrics == {}
    made.next(1)
    assert source.asked <= 40  # the windows that were needed
    taken = uids(stream(StreamedRows(Source(40).read, 20)).next(80))
    numbers = [int(uid[2:].partition("#")[0]) for uid in taken]
    assert max(numbers[:20]) < 20 <= min(numbers[20:40])
    assert numbers[:20] != sorted(numbers[:20])
    assert numbers[:20] != numbers[40:60]


def test_no_more_rows_are_read_and_kept_than_the_windows_that_are_needed() -> None:
    source = Source(10**9)
    rows = StreamedRows(source.read, 8)
    made = stream(rows)
    made.next(17)
    assert source.asked == 24
    made.next(1000)
    assert len(rows._windows) == KEPT


class Unreadable(Source):
    """Rows from number ``failing`` on cannot be read."""

    failing = 6

    def read(self, start: int) -> Iterator[Row | SourceError]:
        for row in super().read(start):
            if isinstance(row, Row) and int(row.uid[2:]) >= self.failing:
                raise SourceError("rows.jsonl", "cannot be read: [Errno 5] Input/output error")
            yield row


def test_prompts_before_a_row_that_cannot_be_read_are_given_before_its_error() -> None:
    source = Unreadable(20)
    made = stream(StreamedRows(source.read, 4))
    assert len(made.next(10)) == 4
    with pytest.raises(SourceError, match="Input/output error"):
        made.next(1)
    assert made.cursor == 4
    source.failing = 20
    assert len({*uids(made.next(16))}) == 16
    ahead = stream(StreamedRows(Unreadable(20).read, 4), cursor=8)
    ahead.read_ahead()  # raises nothing yet
    with pytest.raises(SourceError, match="Input/output error"):
        ahead.next(1)
    with pytest.raises(SourceError, match="has no rows"):
        stream(StreamedRows(Source(0).read, 8)).next(1)


@pytest.mark.parametrize("count", [10, 12])
def test_the_end_of_an_epoch_is_seen_without_reading_the_rows_again(count: int) -> None:
    source = Source(count)
    stream(StreamedRows(source.read, 4)).next(count)
    before = source.asked
    stream_of = stream(StreamedRows(source.read, 4))
    stream_of.next(count + 1)
    assert source.asked - before <= count + 4


@pytest.mark.parametrize("position", [0, 1, 4999, 9_999])
def test_few_rows_are_read_to_find_a_prompt_behind_many_that_were_left_out(position: int) -> None:
    source = Source(10_000)
    source.apart = 20
    number = source.apart * position
    assert stream(StreamedRows(source.read, 8)).find(f"0:{number}#0").uid == f"0:{number}#0"
    assert source.asked <= 8 * 18


@pytest.mark.parametrize("cursor", [500, 2000, 2300])
def test_what_was_read_ahead_is_not_read_again_by_the_next_prompt(cursor: int) -> None:
    source = Source(1000)
    made = stream(StreamedRows(source.read, 8), cursor)
    made.find("0:3#0")
    made.read_ahead()
    before = source.asked
    made.next(1)
    assert source.asked == before


def test_a_thread_reads_every_window_but_the_first_also_that_of_the_next_epoch() -> None:
    """The caller is an event loop."""
    source, callers = Source(36), []

    def read(start: int) -> Iterator[Row | SourceError]:
        for row in source.read(start):
            callers.append(threading.current_thread() is threading.main_thread())
            yield row

    stream(StreamedRows(read, 8)).next(60)
    assert callers == [True] * 8 + [False] * (len(callers) - 8)
    assert len(callers) > 36


def file(tmp_path: Path, *lines: str) -> StreamedRows:
    (tmp_path / "a.jsonl").write_text("".join(f"{line}\n" for line in lines))
    source = FileSource(path=str(tmp_path / "a.jsonl"))
    return StreamedRows(partial(source.rows, 0, DataConfig(train=[])), 4)


def line(text: str, source: str = "a") -> str:
    return f'{{"prompt": "{text}", "data_source": "{source}"}}'


@examples(40)
@given(
    st.lists(st.booleans(), min_size=1, max_size=40).filter(any),
    st.sampled_from(["", "{oops"]),
    st.data(),
)
def test_a_prompt_is_found_again_behind_blank_and_unreadable_lines(
    tmp_path_factory: pytest.TempPathFactory, full: list[bool], blank: str, data: Any
) -> None:
    lines = [line(f"p{at}") if one else blank for at, one in enumerate(full)]
    made = stream(file(tmp_path_factory.mktemp("rows"), *lines))
    at = data.draw(st.integers(0, len(full) + 3))
    if at < len(full) and full[at]:
        assert made.find(f"0:{at}#2").uid == f"0:{at}#2"
    else:  # blank, unreadable or behind the end
        with pytest.raises(KeyError):
            made.find(f"0:{at}#2")


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ("{oops", r"a.jsonl, row 3: is not JSON"),
        ('{"data_source": "a"}', r"row 3: has no field 'prompt'"),
        (line("x", "nobody's"), r"""no teacher for data source "nobody's" \(row 0:2\)"""),
    ],
)
def test_a_bad_row_behind_those_that_were_checked_is_lost_and_ends_nothing(
    tmp_path: Path, bad: str, reason: str
) -> None:
    taken = stream(file(tmp_path, line("p"), line("p"), bad, line("p")), shuffle=False).next(4)
    assert uids(taken) == ["0:0#0", "0:1#0", "0:2#0", "0:3#0"]
    lost = taken[2]
    assert isinstance(lost, DeadLetter)
    assert (lost.header.teacher, lost.stage) == (NO_TEACHER, "prompt")
    assert re.search(reason, lost.reason)


# ── before a run ──────────────────────────────────────────────────────────────────────────────


def checked(tmp_path: Path, *lines: str, window: int = 2) -> Inputs:
    (tmp_path / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    entry = f"{{path: {tmp_path / 'rows.jsonl'}, stream: true, window: {window}}}"
    return preflight(config(f"data.train=[{entry}]"), "c.yaml", 0)


SORT, REVERSE = line("sort 1=", "sort"), line("reverse 1=", "reverse")


def test_the_first_window_of_a_streamed_source_is_checked_and_only_that(tmp_path: Path) -> None:
    found = checked(tmp_path, SORT, SORT, REVERSE, "{oops")  # reverse: a teacher's, and later
    assert found.problems == []
    assert [len(rows) for rows in found.checked] == [2]
    assert any("is streamed: its first 2 rows are checked" in note for note in found.notes)
    (problem,) = checked(tmp_path, SORT, "{oops").problems
    assert problem.where.endswith("rows.jsonl, row 2")
    (problem,) = checked(tmp_path).problems
    assert problem.message == "has no rows"


def test_an_evaluation_cannot_be_streamed(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text(SORT)
    entry = f"{{path: {tmp_path / 'rows.jsonl'}, stream: true}}"
    (problem,) = preflight(config(f"data.eval=[{entry}]"), "c.yaml", 0).problems
    assert "an evaluation takes all of its rows" in problem.message


def test_a_source_without_end_is_taken_from_where_it_is_needed() -> None:
    source = SquaresSource(kind="squares", window=4, subject="a")
    rows = StreamedRows(partial(source.rows, 0, DataConfig(train=[])), 4)
    assert sorted(uids(stream(rows, cursor=10**5).next(4))) == [
        f"0:{number}#0" for number in range(10**5, 10**5 + 4)
    ]


@given(
    st.lists(st.booleans(), min_size=1, max_size=40).filter(any),
    st.integers(1, 8),
    st.integers(0, 60),
)
def test_a_filtered_source_is_resumed_at_the_row_that_was_next(
    fitting: list[bool], window: int, before: int
) -> None:
    def made(cursor: int = 0) -> PromptStream:
        rows = StreamedRows(Source(len(fitting)).read, window)
        return stream(rows.only(lambda row: fitting[number_of(row)]), cursor)

    whole = uids(made().next(before + 10))
    assert whole[before:] == uids(made(before).next(10))
    numbers = {int(uid.partition(":")[2].partition("#")[0]) for uid in whole}
    assert all(fitting[number] for number in numbers)
    epoch = whole[: sum(fitting)]
    assert len(epoch) == len(set(epoch))


def test_each_row_that_a_filtered_source_leaves_out_is_counted_once_also_after_a_resume() -> None:
    def made(cursor: int = 0) -> PromptStream:
        rows = StreamedRows(Source(40).read, 4)
        return stream(rows.only(lambda row: number_of(row) % 4 != 0), cursor)

    prompts = made()
    assert prompts.metrics == {"data/overlong_rows": 0.0}
    prompts.next(75)  # 30 rows fit: two epochs and a half
    assert prompts.metrics == {"data/overlong_rows": 10.0}
    resumed = made(75)
    resumed.next(1)
    assert resumed.metrics == {"data/overlong_rows": 10.0}


def test_positions_in_a_filtered_source_are_found_without_looking_at_all_rows_again() -> None:
    looked = list[int]()

    def fits(row: Row) -> bool:
        looked.append(number_of(row))
        return number_of(row) % 2 == 0

    rows = StreamedRows(Source(4000).read, 256).only(fits)
    rows.taken(1500, None)
    looked.clear()
    rows.find(1024)
    assert min(looked) >= 500
