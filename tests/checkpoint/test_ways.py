"""Which step a resume takes where the run has gone back, or was continued by several machines."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict
from pathlib import Path
from unittest.mock import patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem

from async_opd.accounting.lineage import (
    ROLL_BACKS,
    Beginning,
    RollBack,
    add_roll_back,
    begun_after,
    read_roll_backs,
)
from async_opd.checkpoint.earlier_run import newest_mirrored, take_mirrored
from async_opd.checkpoint.run_copies import END, RunCopies
from async_opd.checkpoint.store import CUT, MANIFEST, Checkpoints
from async_opd.core.errors import ConfigError
from async_opd.files.durable import written_file
from async_opd.files.remote import RemoteFile
from tests.checkpoint.test_mirror import IDENTITY, URL, LocalRun, summary, sync

pytestmark = pytest.mark.usefixtures("empty_store")

START = (Beginning("a", 0),)


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    """A run with the steps 2 and 4, which are mirrored."""
    made = LocalRun(tmp_path / "run", lineage=START)
    made.train(2)
    made.train(4)
    sync(made)
    return made


def goes_on(folder: Path, notes: list[str] | None = None) -> LocalRun:
    """Another process, in a directory with or without an earlier one."""
    taken = take_mirrored(URL, folder, IDENTITY)
    found = Checkpoints(folder / "checkpoints", 2).newest(taken.append)
    assert found is not None
    if notes is not None:
        notes += taken
    lineage = Checkpoints(folder / "checkpoints", 2).lineage()
    return LocalRun(folder, lineage=begun_after(found.cut.step, lineage))


def record(run: LocalRun, to: int) -> None:
    """The first write of a rollback."""
    run.lineage = begun_after(to, run.lineage)
    add_roll_back(run.folder, RollBack(5, "cut off", run.lineage))


def test_a_copy_whose_upload_outlasts_a_rollback_is_complete_and_is_not_taken(
    run: LocalRun, tmp_path: Path
) -> None:
    mirror, upload, first = run.mirror(), RemoteFile.upload, threading.Semaphore(1)

    def slow(self: RemoteFile, source: Path) -> object:
        if first.acquire(blocking=False):
            record(run, to=4)
            assert mirror.roll_back(20) is None
        return upload(self, source)

    run.train(6)
    with patch.object(RemoteFile, "upload", slow):
        mirror._sync(False)
    assert RunCopies.at(URL).complete("step_6") is not None
    assert newest_mirrored(URL, tmp_path / "other") == 4
    assert goes_on(tmp_path / "other").store.steps() == [4]


def test_on_another_machine_no_rollback_is_forgotten(run: LocalRun, tmp_path: Path) -> None:
    record(run, to=4)
    run.train(6)
    sync(run)  # this copy has one rollback
    record(run, to=6)
    assert run.mirror().roll_back(20) is None
    goes_on(tmp_path / "other")
    assert read_roll_backs(tmp_path / "other") == read_roll_backs(run.folder)
    bare = LocalRun(tmp_path / "bare", lineage=START)  # without a checkpoint
    MemoryFileSystem.store.clear()
    record(bare, to=0)
    assert bare.mirror().roll_back(20) is None
    take_mirrored(URL, tmp_path / "third", IDENTITY)
    assert read_roll_backs(tmp_path / "third") == read_roll_backs(bare.folder)


def test_a_new_run_removes_the_notes_of_another_one(tmp_path: Path) -> None:
    (RemoteFile(URL) / "roll_backs_2.json").write(b"[]")
    made = LocalRun(tmp_path / "run", lineage=START)
    made.train(2)
    sync(made)
    assert not (RemoteFile(URL) / "roll_backs_2.json").exists()


def test_in_its_directory_a_rollback_outlasts_an_older_copy_that_is_taken(run: LocalRun) -> None:
    record(run, to=4)
    (run.store.folder / "step_4" / "trainer.safetensors").write_bytes(b"a broken disk")
    (run.store.folder / "step_2" / "trainer.safetensors").write_bytes(b"a broken disk")
    before = read_roll_backs(run.folder)
    assert "step 4 is taken" in take_mirrored(URL, run.folder, IDENTITY)[-1]
    assert read_roll_backs(run.folder) == before


def test_a_note_that_was_cut_off_leaves_the_one_before(run: LocalRun, tmp_path: Path) -> None:
    record(run, to=4)
    assert run.mirror().roll_back(20) is None
    (RemoteFile(URL) / "roll_backs_2.json").write(b'[{"step": 5, "rea')
    goes_on(tmp_path / "other")
    assert len(read_roll_backs(tmp_path / "other")) == 1


def test_the_end_of_the_run_before_goes_when_a_rollback_is_noted(run: LocalRun) -> None:
    assert run.mirror().close(summary("interrupted")) is None
    record(run, to=2)
    assert run.mirror().roll_back(20) is None
    assert RunCopies.at(URL).complete(END) is None


def test_a_store_that_hangs_is_waited_for_within_a_bound(run: LocalRun) -> None:
    record(run, to=2)
    answer = threading.Event()
    with patch.object(RunCopies, "claim", lambda *_: answer.wait(60)):
        warning = run.mirror().roll_back(0.05)
        answer.set()
    assert "does not have the rollback yet: no answer within 0.05 s" in warning
    assert f"resume the run only in {run.folder}" in warning


def test_a_run_killed_in_a_rollback_leaves_the_step_without_a_mirror_too(run: LocalRun) -> None:
    record(run, to=2)
    notes: list[str] = []
    found = run.store.newest(notes.append)
    assert found.cut.step == 2
    assert notes == ["the run has gone on without step 4: it is skipped, and is now step_4.left"]


def test_where_the_run_went_on_elsewhere_its_directory_follows_and_keeps_no_other_step(
    run: LocalRun, tmp_path: Path
) -> None:
    run.train(6)  # and no copy of it
    other = goes_on(tmp_path / "other")
    other.train(8)
    sync(other)
    notes: list[str] = []
    goes_on(run.folder, notes)
    assert run.store.steps() == [4, 8]
    assert "the run has gone on without step 6: it is skipped, and is now step_6.left" in notes


def test_a_directory_that_came_further_another_way_is_refused(
    run: LocalRun, tmp_path: Path
) -> None:
    other = goes_on(tmp_path / "other")
    other.train(6)
    sync(other)
    run.train(10)
    with pytest.raises(ConfigError, match=r"another way of the run, until step 6.* has step 10"):
        goes_on(run.folder)
    assert run.store.steps() == [4, 10]


def test_a_rollback_that_those_who_went_on_elsewhere_do_not_know_is_refused(
    run: LocalRun, tmp_path: Path
) -> None:
    other = goes_on(tmp_path / "other")
    other.train(6)
    sync(other)
    record(run, to=2)
    with pytest.raises(ConfigError, match="has a rollback that is not on it") as caught:
        goes_on(run.folder)
    assert "name another --run-dir to go on from the URL" in str(caught.value)


def test_a_rollback_elsewhere_leaves_the_steps_of_this_directory(
    run: LocalRun, tmp_path: Path
) -> None:
    other = goes_on(tmp_path / "other")
    record(other, to=2)
    assert other.mirror().roll_back(20) is None
    goes_on(run.folder)
    assert run.store.steps() == [2]
    assert len(read_roll_backs(run.folder)) == 1


def test_after_a_damaged_checkpoint_the_step_before_goes_on_without_its_copy(run: LocalRun) -> None:
    run.lineage = begun_after(2, run.lineage)  # the trainer died, and step 4 was damaged
    (run.store.folder / "step_4").rename(run.store.folder / "step_4.damaged")
    run.train(3)
    assert take_mirrored(URL, run.folder, IDENTITY) == []
    assert run.store.steps() == [2, 3]


def as_before_lineages(folder: Path) -> None:
    """Makes a checkpoint one of an earlier version of async_opd."""
    cut = json.loads((folder / CUT).read_text())
    assert cut.pop("lineage") == []
    (folder / CUT).write_text(json.dumps(cut))
    manifest = json.loads((folder / MANIFEST).read_text())
    manifest[CUT] = asdict(written_file(folder / CUT))
    (folder / MANIFEST).write_text(json.dumps(manifest))


def test_copies_and_directories_without_lineages_go_on(tmp_path: Path) -> None:
    before = LocalRun(tmp_path / "run")
    for step in (2, 4):
        before.train(step)
        as_before_lineages(before.store.folder / f"step_{step}")
    (before.folder / ROLL_BACKS).write_text('[{"step": 3, "reason": "cut off"}]')
    sync(before)
    later = goes_on(tmp_path / "other")
    later.train(6)
    sync(later)
    assert len(read_roll_backs(later.folder)) == 1
    goes_on(before.folder)
    assert before.store.steps() == [2, 4, 6]
