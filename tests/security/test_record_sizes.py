"""A stranger's run directory, or a mirror: sizes are bounded before the content is read."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from async_opd.accounting.audit import AuditError, audit
from async_opd.accounting.journal import LEDGER
from async_opd.checkpoint.run_copies import LISTING, RunCopies, record_and_weights, run_at
from async_opd.checkpoint.store import CUT, load
from async_opd.core.errors import CheckpointError, ConfigError
from async_opd.files.durable import written_file
from async_opd.files.foreign import ForeignPath
from async_opd.files.lines import metrics_rows
from async_opd.files.origin import ORIGIN, read_origins
from async_opd.files.run_format import write_run_format
from async_opd.microscope import (
    FILE_BYTES,
    MICROSCOPE,
    RecordError,
    RecordWriter,
    from_bytes,
    records,
    to_bytes,
    unreadable,
)
from async_opd.observability.live.live_file import LIVE_FILE, read_live
from async_opd.tools.report.recorded_run import read_summary
from async_opd.tools.report.sample_timelines import read_timelines
from tests.checkpoint.test_mirror import LocalRun, sync
from tests.fuzz.command import bounded
from tests.microscope.samples import record

pytestmark = pytest.mark.usefixtures("empty_store")

URL = "memory://bucket/run"
LONG = " " * (17 << 20)


def archive(declared: int | None = None, **arrays: Any) -> bytes:
    """A file of records with other arrays, the first of which may say another size.

    In place of an array a shape, of values without bytes.
    """
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as made:
        for name, array in arrays.items():
            content = io.BytesIO()
            if isinstance(array, tuple):
                about = {"descr": "|V0", "fortran_order": False, "shape": array}
                np.lib.format.write_array_header_1_0(content, about)
            else:
                np.save(content, array)
            made.writestr(f"{name}.npy", content.getvalue())
        if declared is not None:
            made.infolist()[0].file_size = declared
    return file.getvalue()


def head(tokens: int = 3) -> Any:
    """One sample without columns."""
    fields = {**vars(record()), "columns": None, "texts": None, "images": (), "tokens": tokens}
    known = {key: value for key, value in fields.items() if value is not None}
    return np.frombuffer(json.dumps({"samples": [known], "texts": {}}).encode(), np.uint8)


TOKENS = np.zeros(3, np.int32)


def test_records_that_say_more_bytes_than_are_read_are_refused() -> None:
    content = archive(FILE_BYTES + 1, token=TOKENS, head=head())
    with pytest.raises(RecordError, match=r"its arrays have 268\d+ bytes"):
        from_bytes(content)


def test_a_head_is_bounded_by_itself() -> None:
    content = archive(FILE_BYTES // 4 + 1, head=head(), token=TOKENS)
    with pytest.raises(RecordError, match="its head 67108865"):
        from_bytes(content)


def test_an_array_that_is_longer_than_the_archive_says_is_not_read_to_its_end() -> None:
    content = archive(200, token=np.zeros(1 << 20, np.int32), head=head())
    with pytest.raises(RecordError):
        from_bytes(content)


def test_columns_that_are_not_known_are_not_read() -> None:
    (found,) = from_bytes(archive(token=TOKENS, other=TOKENS, head=head()))
    assert list(found.columns) == ["token"]


@pytest.mark.parametrize("column", [(10**12,), np.zeros(3, "U4"), np.zeros(4, np.int32)])
def test_a_column_has_a_number_for_each_token(column: Any) -> None:
    with pytest.raises(RecordError, match="has not a number for each of 3 tokens"):
        from_bytes(archive(token=column, head=head()))


HEADS = [np.array(1 << 62), np.zeros(3, "V0"), np.zeros((1, 3), np.uint8)]


@pytest.mark.parametrize("value", HEADS)
def test_a_head_that_is_one_number_is_not_read_as_so_many_bytes(value: Any) -> None:
    with pytest.raises(RecordError, match="its head is not a row of bytes"):
        from_bytes(archive(token=TOKENS, head=value))


def test_a_second_head_under_a_bare_name_is_not_read() -> None:
    content = io.BytesIO(archive(token=TOKENS, head=head()))
    with zipfile.ZipFile(content, "a", zipfile.ZIP_DEFLATED) as made:
        made.writestr("head", b"[" * (FILE_BYTES // 4 + 1))
    with pytest.raises(RecordError, match="its head 67108865"):
        from_bytes(content.getvalue())


@pytest.mark.parametrize("name", ["token", "student_ids"])
def test_tokens_without_numbers_are_no_tokens(name: str) -> None:
    many = 10**12
    empty = np.lib.stride_tricks.as_strided(np.zeros(1, np.int32), (many, 0), (4, 4))
    with pytest.raises(RecordError, match=r"has not a number for each|'token'"):
        from_bytes(archive(**{name: empty}, head=head(many)))


def test_all_ranks_of_a_step_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for rank in range(3):
        RecordWriter(tmp_path / MICROSCOPE, rank, 1 << 20).write(1, [record(f"p/{rank}")])
    with zipfile.ZipFile(next((tmp_path / MICROSCOPE).iterdir())) as file:
        size = sum(one.file_size for one in file.infolist())
    monkeypatch.setattr("async_opd.microscope.STEP_BYTES", size + 10)
    assert [one.uid for one in records(tmp_path)] == ["p/0"]
    assert [line.split(":")[0] for line in unreadable(tmp_path)] == [
        "step_000001.rank_1.npz",
        "step_000001.rank_2.npz",
    ]


def test_a_run_writes_no_file_that_a_reader_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples = [record(f"p/{number}") for number in range(8)]
    kept = len(to_bytes(samples))
    monkeypatch.setattr(
        "async_opd.microscope.excess",
        lambda content, most=0: "too much" * (len(content) >= kept),
    )
    writer = RecordWriter(tmp_path / MICROSCOPE, 0, 1 << 20)
    writer.write(1, samples)
    assert (len(list(records(tmp_path))), writer.removed) == (4, 4)


@pytest.mark.parametrize(
    ("name", "content", "read", "nothing"),
    [
        ("summary.json", {"status": "completed", "seconds": 1}, read_summary, None),
        (ORIGIN, [{"command": "a", "versions": {}, "commit": ""}], read_origins, []),
        (
            LIVE_FILE,
            {"pid": 1, "host": "a", "born": 1, "started": 1, "time": 1, "waits": {}},
            read_live,
            None,
        ),
    ],
)
def test_a_small_file_that_is_large_is_not_read(
    tmp_path: Path, name: str, content: Any, read: Callable[[Path], Any], nothing: Any
) -> None:
    (tmp_path / name).write_text(json.dumps(content))
    assert read(tmp_path) not in (None, [])
    (tmp_path / name).write_text(json.dumps(content) + LONG)
    assert read(tmp_path) == nothing


def test_the_state_of_a_checkpoint_is_bounded(tmp_path: Path) -> None:
    run = LocalRun(tmp_path / "run")
    run.train(2)
    folder = run.store.folder / "step_2"
    manifest = json.loads((folder / "manifest.json").read_text())
    with (folder / CUT).open("r+") as file:
        file.truncate(65 << 20)
    manifest[CUT] = vars(written_file(folder / CUT))
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError, match="has more than 67108864 bytes"):
        load(folder)


def test_a_line_of_metrics_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_text(f'{{"step": 1}}\n{{"step": 2{LONG}}}\n')
    rows = metrics_rows(file)
    assert next(rows)[1] is not None
    with pytest.raises(OSError, match="has a line of more than 16777216 bytes"):
        next(rows)


def test_a_line_of_a_trace_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_text(f'["life"{LONG}]\n')
    with pytest.raises(OSError, match="has a line of more than"):
        list(read_timelines(tmp_path / "trace.json"))


def trace(file: Path, pauses: int, lives: int, length: int = 1) -> Path:
    """A trace of one replica, during all of whose pauses each sample is sampled."""
    end = 4 * pauses
    moments = [("admission", "admit", 0), ("rollout", "generate", 0), ("teacher/a", "lease", end)]
    moments += [("teacher/a", "score", end), ("train", "lease", end), ("train", "step", end)]
    life = [(pool, what, "t", start, end) for pool, what, start in moments]
    place = {"pid": 1, "tid": 2}
    events: list[dict[str, Any]] = [{"name": "thread_name", "args": {"name": "t sync"}}]
    events += [
        {"name": "sync", "cat": "rollout", "ph": "X", "ts": 4 * at, "dur": length, "is": "sync"}
        for at in range(pauses)
    ]
    args = [{"uid": str(number), "life": life} for number in range(lives)]
    events += [{"name": "s", "ph": "f", "args": one} for one in args]
    file.write_text("".join(json.dumps(event | place) + ",\n" for event in events))
    return file


def test_the_parts_of_all_lives_of_a_trace_are_bounded_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = trace(tmp_path / "trace.json", pauses=10, lives=3)
    assert [len(life.parts) for life in read_timelines(file)] == [20, 20, 20]
    monkeypatch.setattr("async_opd.tools.report.sample_timelines.MOST_PARTS", 59)
    lives = read_timelines(file)
    assert [next(lives).uid, next(lives).uid] == ["0", "1"]
    with pytest.raises(OSError, match="says more than 59 parts of lives"):
        next(lives)


@pytest.mark.parametrize("length", [0, -1, 1 << 40])
def test_pauses_that_hide_each_other_are_not_looked_at_for_each_life(
    tmp_path: Path, length: int
) -> None:
    file = trace(tmp_path / "trace.json", pauses=20_000, lives=20_000, length=length)
    with bounded():
        lives = list(read_timelines(file))
    assert {len(life.parts) for life in lives} == {1}


def test_a_line_of_the_journal_is_bounded(tmp_path: Path) -> None:
    write_run_format(tmp_path)
    (tmp_path / LEDGER).write_text(f'{{"admitted": []{LONG}}}\n')
    with pytest.raises(AuditError, match="has a line of more than"):
        audit(tmp_path)


def test_the_lines_of_a_file_are_bounded_together(tmp_path: Path) -> None:
    (tmp_path / "run.log").write_text("\n" * 10)
    assert len(list(ForeignPath(tmp_path / "run.log").lines(10 * 257))) == 10
    with pytest.raises(OSError, match="has more than 2569 bytes"):
        list(ForeignPath(tmp_path / "run.log").lines(10 * 257 - 1))


@pytest.fixture
def mirrored(empty_store: None, tmp_path: Path) -> LocalRun:
    run = LocalRun(tmp_path / "run")
    run.train(2)
    sync(run)
    return run


def change(**files: Any) -> None:
    """Changes sizes that ``files.json`` of the copy of step 2 says."""
    place = RunCopies.at(URL).place / "step_2" / LISTING
    listing = json.loads(place.read(1 << 20))
    for name, size in files.items():
        listing[name]["bytes"] = size
    place.write(json.dumps(listing).encode())


def refused_copy() -> str:
    """Why ``inspect URL`` does not read the copy; no file of it is downloaded."""
    with pytest.raises((CheckpointError, ConfigError)) as caught, run_at(URL):
        pass
    return str(caught.value)


def test_a_mirror_does_not_fill_the_disk(mirrored: LocalRun) -> None:
    change(**{"checkpoints/step_2/trainer.safetensors": 1 << 60})
    with (
        pytest.raises(CheckpointError, match="of which 1073741824 stay free"),
        run_at(URL, record_and_weights),
    ):
        pass


def test_a_record_of_a_mirror_is_no_larger_than_its_readers_read(mirrored: LocalRun) -> None:
    change(**{LEDGER: 3 << 30})
    assert f"its {LEDGER} has 3221225472 bytes, more than the 2147483648" in refused_copy()


def test_a_config_of_a_mirror_is_no_larger_than_a_document(mirrored: LocalRun) -> None:
    change(**{"config.yaml": 17 << 20})
    assert "its config.yaml has 17825792 bytes, more than the 16777216" in refused_copy()


def test_a_size_below_zero_makes_a_copy_incomplete(mirrored: LocalRun) -> None:
    change(**{LEDGER: -2})
    assert "has no complete copy of a run" in refused_copy()


def test_the_state_of_a_mirrored_checkpoint_is_not_read_beyond_its_bound(
    mirrored: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("async_opd.checkpoint.run_copies.CUT_BYTES", 10)
    assert RunCopies.at(URL).mirrored().lineages == {}


def test_the_lists_of_all_copies_are_bounded_together(
    mirrored: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirrored.train(4)
    sync(mirrored)
    most = len((RunCopies.at(URL).place / "step_4" / LISTING).read(1 << 20)) + 10
    monkeypatch.setattr("async_opd.checkpoint.run_copies.MAX_LISTING_BYTES", most)
    with pytest.raises(OSError, match="has more than"):
        RunCopies.at(URL).mirrored()
