"""The journal of a run, and what the audit finds in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from async_opd.accounting.audit import Audit, AuditError, audit
from async_opd.accounting.journal import LEDGER, Journal
from async_opd.accounting.ledger import Ledger
from async_opd.core.errors import ConfigError, StageError
from async_opd.core.samples import Header
from async_opd.files.run_format import FORMAT_FILE, write_run_format
from tests.conftest import make_prompt


@pytest.fixture(autouse=True)
def run_format(tmp_path: Path) -> None:
    write_run_format(tmp_path)


def header(uid: str) -> Header:
    return Header(uid, 1, 1, 0, "t")


def completed(run_dir: Path) -> Audit:
    (run_dir / "summary.json").write_text(json.dumps({"status": "completed"}))
    return audit(run_dir)


def test_a_run_that_trained_everything_once_has_nothing_to_report(tmp_path: Path) -> None:
    with Journal(tmp_path / LEDGER) as journal:
        ledger = Ledger(2, journal)
        ledger.admitted([make_prompt("p"), make_prompt("q")])
        ledger.trained([header("p/0"), header("q/1")], 1)
        ledger.trained([header("p/1"), header("q/0")], 2)
    found = completed(tmp_path)
    assert found == Audit(("p/0", "q/1", "p/1", "q/0"), (), (), (), (), 2)


def test_a_sample_without_an_outcome_is_lost_if_the_run_is_completed(tmp_path: Path) -> None:
    with Journal(tmp_path / LEDGER) as journal:
        Ledger(2, journal).admitted([make_prompt("p")])
    assert (audit(tmp_path).in_flight, audit(tmp_path).lost) == (("p/0", "p/1"), ())
    assert (completed(tmp_path).in_flight, completed(tmp_path).lost) == ((), ("p/0", "p/1"))


def test_a_sample_with_two_states_is_duplicated(tmp_path: Path) -> None:
    with Journal(tmp_path / LEDGER) as journal:
        journal.admitted(["p/0", "r/0"])
        journal.trained(1, ["p/0", "r/0"])
        journal.trained(2, ["p/0", "q/0"])
        journal.dead("r/0")
    assert sorted(completed(tmp_path).duplicated) == ["p/0", "q/0", "r/0"]


def test_dead_letters_are_not_lost_also_those_of_prompts_never_sampled(tmp_path: Path) -> None:
    with Journal(tmp_path / LEDGER) as journal:
        ledger = Ledger(2, journal)
        ledger.admitted([make_prompt("q")], members=1)
        ledger.dead_lettered(header("q/0"))
        ledger.refused(header("p"))
    found = completed(tmp_path)
    assert (found.dead_lettered, found.lost, found.duplicated) == (("q/0", "p/0", "p/1"), (), ())


@pytest.mark.parametrize(
    ("line", "content"),
    [
        (2, b'{"admitted":["p/0"]}\nnonsense\n{"dead":["p/0"]}\n'),
        (1, b'{"admitted":7}\n'),
        (1, b'{"trained":[["p/0"]]}\n'),
        (1, b'{"dead":"p/0"}\n'),
        (1, b'{"step":"one"}\n'),
        (1, b'{"step":null}\n'),
    ],
)
def test_damage_is_an_error_with_its_line(tmp_path: Path, line: int, content: bytes) -> None:
    (tmp_path / LEDGER).write_bytes(content)
    with pytest.raises(AuditError, match=rf"ledger\.jsonl, line {line}, is not an entry of a j"):
        audit(str(tmp_path))


def test_a_run_directory_without_a_journal_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AuditError, match="cannot be read"):
        audit(tmp_path)


def test_a_step_with_an_unknown_sample_counts_for_none_of_its_samples() -> None:
    ledger = Ledger(1)
    ledger.admitted([make_prompt("p")])
    with pytest.raises(Exception, match="q/0 came out of the pipeline"):
        ledger.trained([header("p/0"), header("q/0")], 1)
    assert ledger.counts["trained"] == 0


def test_a_restored_ledger_samples_again_what_was_in_flight_and_not_finished() -> None:
    one = Ledger(2)
    prompts = {uid: make_prompt(uid) for uid in ("p", "q")}
    one.admitted(prompts.values())
    one.requeued([header("q/1")])
    one.trained([header("p/0")], 1)
    two = Ledger(2)
    two.restore(one.state(), prompts.__getitem__)
    assert two.counts == one.counts
    again = [(group.prompt.uid, group.members) for group in two.unfinished_groups({"q/0"})]
    assert again == [("p", (1,)), ("q", (1,))]


class Disk:
    """A journal's file on a disk with room for so many bytes, which it takes two at a time."""

    def __init__(self, journal: Journal, room: int) -> None:
        self._file, self.room = journal._file, room
        journal._file = self  # type: ignore[assignment]

    def write(self, data: memoryview) -> int:
        part = data[: min(2, self.room)]
        if not part:
            raise OSError(28, "No space left on device")
        self.room -= len(part)
        return self._file.write(part)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_line_that_the_disk_takes_in_parts_is_whole(tmp_path: Path) -> None:
    with Journal(tmp_path / LEDGER) as journal:
        Disk(journal, 1000)
        journal.admitted(["p/0", "p/1"])
    assert audit(tmp_path).in_flight == ("p/0", "p/1")


def test_a_full_disk_leaves_no_torn_line_and_no_size_for_a_checkpoint(tmp_path: Path) -> None:
    with Journal(tmp_path / LEDGER) as journal:
        journal.admitted(["p/0"])
        disk = Disk(journal, 5)
        with pytest.raises(StageError, match=r"ledger.jsonl cannot be written: No space left"):
            journal.admitted(["q/0"])
        disk.room = 1000  # somebody has made room: what was not written is missing all the same
        with pytest.raises(StageError, match="cannot be written"):
            journal.size  # noqa: B018
        with pytest.raises(StageError, match="cannot be written"):
            journal.trained(1, ["q/0"])
    assert (tmp_path / LEDGER).read_bytes() == b'{"admitted":["p/0"]}\n'


@pytest.mark.parametrize(("size", "goes_on"), [(30, 21), (21, 21), (0, 0)])
def test_a_journal_goes_on_where_it_was_cut_after_its_last_whole_line(
    tmp_path: Path, size: int, goes_on: int
) -> None:
    (tmp_path / LEDGER).write_bytes(b'{"admitted":["p/0"]}\n{"step":1,"trai')
    assert audit(tmp_path).in_flight == ("p/0",)
    with Journal(tmp_path / LEDGER, size) as journal:
        assert journal.size == goes_on
        journal.dead("p/0")
    found = audit(tmp_path)
    assert (found.in_flight, found.dead_lettered) == ((), ("p/0",))


def test_a_journal_that_goes_back_forgets_what_came_later(tmp_path: Path) -> None:
    with Journal(tmp_path / LEDGER) as journal:
        journal.admitted(["p/0", "p/1"])
        size = journal.size
        journal.trained(1, ["p/0"])
        journal.rewind(size)
        journal.trained(1, ["p/1"])
    assert audit(tmp_path).trained == ("p/1",)


def test_a_run_directory_of_another_format_is_not_audited(tmp_path: Path) -> None:
    with Journal(tmp_path / LEDGER) as journal:
        Ledger(2, journal).admitted([make_prompt("p")])
    (tmp_path / FORMAT_FILE).write_text('{"run_format": 99}')
    with pytest.raises(ConfigError, match="found 99, expected"):
        audit(tmp_path)
