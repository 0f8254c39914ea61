"""The mirror: whatever fails or dies while it writes, what is complete there is a whole run."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from fsspec.implementations.memory import MemoryFileSystem
from hypothesis import given
from hypothesis import strategies as st

from async_opd.accounting.journal import LEDGER
from async_opd.accounting.lineage import Lineage
from async_opd.checkpoint.earlier_run import (
    is_completed,
    refuse_another,
    refuse_mirrored,
    take_mirrored,
)
from async_opd.checkpoint.mirror import TRIES, Mirror
from async_opd.checkpoint.resume import identity
from async_opd.checkpoint.run_copies import END, LISTING, RunCopies, may_be_copied, run_at
from async_opd.checkpoint.store import Checkpoints, load
from async_opd.config.load import load_config
from async_opd.core.errors import CheckpointError, ConfigError, StageError
from async_opd.files import remote
from async_opd.files.durable import written_file
from async_opd.files.remote import RemoteFile
from async_opd.files.run_format import write_run_format
from async_opd.observability.run_log import RunLog
from async_opd.observability.sinks import Status, Summary
from tests.checkpoint.test_store import ROWS, cut
from tests.properties import examples
from tests.world.config import run_config as config

pytestmark = pytest.mark.usefixtures("empty_store")

URL = "memory://bucket/run"
IDENTITY = identity(config(), ROWS)


class LocalRun:
    """A run directory as a run makes it: its journal grows, and each checkpoint is another one."""

    def __init__(self, folder: Path, keep: int = 2, lineage: Lineage = ()) -> None:
        self.folder, self.lineage = folder, lineage
        self.store = Checkpoints(folder / "checkpoints", keep)
        self.made = 0
        self.ledgers: dict[bytes, bytes] = {}  # of each checkpoint ever made
        folder.mkdir(exist_ok=True)
        (folder / LEDGER).touch()
        (folder / "config.yaml").write_text("name: a\n")
        (folder / "identity.json").write_text(IDENTITY)
        write_run_format(folder)

    def train(self, step: int, identity: str = IDENTITY) -> None:
        """A line of the journal, and a checkpoint of the step."""
        self.made += 1
        with (self.folder / LEDGER).open("a") as file:
            file.write(f'{{"step": {step}, "trained": ["{self.made}"]}}\n')
        ledger = (self.folder / LEDGER).read_bytes()
        state = f"the weights of checkpoint {self.made}".encode()
        part = self.store.begin(step)
        (part / "trainer.safetensors").write_bytes(state)
        files = {"trainer.safetensors": written_file(part / "trainer.safetensors")}
        made = replace(cut(step), files={LEDGER: len(ledger)}, lineage=self.lineage)
        self.store.commit(part, made, identity, files)
        self.ledgers[state] = ledger

    def roll_back(self) -> int:
        """Goes back to the oldest checkpoint; returns its step."""
        step = self.store.steps()[0]
        self.store.roll_back(step)
        size = load(self.store.folder / f"step_{step}").cut.files[LEDGER]
        with (self.folder / LEDGER).open("r+b") as file:
            file.truncate(size)
        return step

    def mirror(self, url: str = URL) -> Mirror:
        return Mirror(self.store, RunCopies.at(url), bound_s=20, grace_s=20)


def taken(url: str, into: Path) -> tuple[int, bytes, bytes]:
    """Step, weights and the journal up to the checkpoint, of what a resume takes from the URL."""
    take_mirrored(url, into, IDENTITY)
    newest = Checkpoints(into / "checkpoints", 2).newest(pytest.fail)
    ledger = (into / LEDGER).read_bytes()[: newest.cut.files[LEDGER]]
    return newest.cut.step, (newest.folder / "trainer.safetensors").read_bytes(), ledger


@pytest.fixture
def run(tmp_path: Path) -> LocalRun:
    """A run with a checkpoint of step 2, which nothing mirrors yet."""
    made = LocalRun(tmp_path / "run")
    made.train(2)
    return made


@pytest.fixture
def mirrored(run: LocalRun) -> LocalRun:
    """The run with the steps 2 and 4, which are mirrored."""
    run.train(4)
    sync(run)
    return run


def sync(run: LocalRun, url: str = URL) -> None:
    run.mirror(url)._sync(False)


def summary(status: Status) -> Summary:
    return Summary(status, None, 1, 1.0, Path())


def ends(run: LocalRun, status: Status = "completed") -> None:
    """With a model and a summary, which are mirrored."""
    (run.folder / "model").mkdir()
    (run.folder / "model" / "config.json").write_text("{}")
    (run.folder / "summary.json").write_text(json.dumps({"status": status}))
    assert run.mirror().close(summary(status)) is None


@pytest.mark.parametrize("url", [URL, f"memory://bucket/{END}", "memory://bucket/step_7"])
def test_what_is_taken_is_what_was_mirrored(tmp_path: Path, url: str) -> None:
    run = LocalRun(tmp_path / "run")
    refuse_mirrored(url)
    for step in (2, 4):
        run.train(step)
        sync(run, url)
    step, weights, ledger = taken(url, tmp_path / "other")
    assert (step, ledger) == (4, run.ledgers[weights])
    assert RunCopies.at(url).steps() == [2, 4]
    found = {path.name for path in (tmp_path / "other").iterdir()}
    assert found == {LEDGER, "checkpoints"}
    with run_at(url) as folder:
        assert (folder / LEDGER).read() == (run.folder / LEDGER).read_bytes()
    with pytest.raises(ConfigError, match="holds an earlier run"):
        refuse_mirrored(url)
    run.folder.rename(tmp_path / "elsewhere")
    sync(run, url)  # a run directory that is gone removes no copy
    assert taken(url, tmp_path / "third")[0] == 4


def test_folders_that_no_mirror_wrote_are_refused(run: LocalRun) -> None:
    (RemoteFile(URL) / "step_100" / "model.safetensors").write(b"of somebody else")
    with pytest.raises(ConfigError, match="no mirror wrote"):
        take_mirrored(URL, run.folder, IDENTITY)


def test_steps_are_removed_as_keep_says_and_others_stay_as_they_are(tmp_path: Path) -> None:
    run = LocalRun(tmp_path / "run")
    for step in (2, 4, 6):
        run.train(step)
        sync(run)
    assert RunCopies.at(URL).steps() == [4, 6]
    with patch.object(RemoteFile, "upload", side_effect=AssertionError("uploaded again")):
        sync(run)
    run.roll_back()
    sync(run)
    assert RunCopies.at(URL).steps() == [4]  # no newer copy is left


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


@contextmanager
def killed_after(operations: int | None) -> Iterator[None]:
    """Kills the process at one of its operations on the store, also within a file."""
    left, turn = [operations], threading.Lock()
    opened, removed = RemoteFile.open, RemoteFile.remove

    def count() -> None:
        with turn:
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed

    def counted(file: Any) -> Any:
        write = file.write

        def one(chunk: bytes) -> Any:
            count()
            return write(chunk)

        file.write = one
        return file

    def open_counted(self: RemoteFile, mode: str = "r", encoding: str | None = None) -> Any:
        if mode != "wb":
            return opened(self, mode, encoding)
        count()
        return counted(opened(self, mode, encoding))

    def remove_counted(self: RemoteFile) -> None:
        """One file after the other, as stores do it."""
        files, path = self._place
        for one in sorted(files.find(path)):
            count()
            files.rm_file(one)
        removed(self)

    with (
        patch.object(RemoteFile, "open", open_counted),
        patch.object(RemoteFile, "remove", remove_counted),
        patch.object(remote, "CHUNK", 40),
    ):
        yield


events = st.lists(
    st.tuples(
        st.sampled_from(["train", "train", "roll back"]),
        st.sampled_from([None, *range(60)]),  # operations until the kill of a sync
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("kind", ["memory", "file"])
@examples(30)
@given(events=events, keep=st.integers(1, 2))
def test_whenever_it_is_killed_the_newest_complete_copy_is_a_checkpoint_with_its_journal(
    kind: str, events: list[tuple[str, int | None]], keep: int
) -> None:
    MemoryFileSystem.store.clear()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        url = URL if kind == "memory" else f"file://{folder}/bucket"
        run, step, whole = LocalRun(folder / "run", keep), 0, False
        for number, (event, operations) in enumerate(events):
            if event == "roll back" and run.store.steps():
                step, whole = run.roll_back(), False  # its next checkpoint may have an old name
            run.train(step := step + 2)
            killed = False
            try:
                with killed_after(operations):
                    sync(run, url)
            except Killed:
                killed = True
            whole = whole or not killed
            newest = RunCopies.at(url).newest()
            if newest is None:
                assert not whole
                continue
            found, weights, ledger = taken(url, folder / f"other {number}")
            assert found == newest[0]
            assert ledger == run.ledgers[weights]
            if not killed:
                assert found == step == run.store.steps()[-1]
                assert weights == f"the weights of checkpoint {run.made}".encode()


def copied_teachers(run: LocalRun, written: str) -> dict[int, set[str]]:
    """The folders of teachers in each step's copy; a folder is removed while it is uploaded."""
    teachers = {"a": {"kind": "self", "refresh_every": 2}, "b": {"model": "b"}}
    settings = config(teachers=teachers, checkpoint={"mirror": URL}, **{"async": {"sync_steps": 1}})
    for name in ("version_2", "version_4", "version_4.part", written):
        (run.folder / "teachers" / name).mkdir(parents=True, exist_ok=True)
        (run.folder / "teachers" / name / "model.safetensors").write_bytes(name.encode())
    mirror = Mirror.of(settings, run.folder)
    assert mirror is not None
    upload = RemoteFile.upload

    def tidied(self: RemoteFile, source: Path) -> Any:
        shutil.rmtree(run.folder / "teachers" / written, ignore_errors=True)
        return upload(self, source)

    with patch.object(RemoteFile, "upload", tidied):
        mirror._sync(False)
    found: dict[int, set[str]] = {}
    for step in RunCopies.at(URL).steps():
        copy = RunCopies.at(URL).complete(f"step_{step}")
        found[step] = {name.split("/")[1] for name in copy.files if name.startswith("teachers/")}
    return found


def test_a_copy_has_the_teachers_of_its_own_checkpoint_only(run: LocalRun) -> None:
    run.train(5)
    assert copied_teachers(run, "version_6") == {2: {"version_2"}, 5: {"version_4"}}
    assert run.mirror().close(summary("completed")) is None
    end = RunCopies.at(URL).complete(END)
    assert not any(name.startswith("teachers/") for name in end.files)


def test_the_newer_checkpoint_wins_between_directory_and_mirror(tmp_path: Path) -> None:
    run, stale = LocalRun(tmp_path / "run"), LocalRun(tmp_path / "stale")
    stale.train(2)
    run.train(2)
    run.train(4)
    sync(run)
    assert taken(URL, stale.folder)[0] == 4
    run.train(6)
    assert take_mirrored(URL, run.folder, IDENTITY) == []


@pytest.mark.parametrize(("theirs", "ours"), [(2, 4), (4, 2)], ids=["older", "newer"])
def test_a_copy_of_another_config_is_refused_and_neither_replaces_nor_is_removed(
    tmp_path: Path, theirs: int, ours: int
) -> None:
    other, run = LocalRun(tmp_path / "other"), LocalRun(tmp_path / "run")
    other.train(theirs, identity(config(seed=1), ROWS))
    sync(other)
    run.train(ours)
    with pytest.raises(ConfigError, match="seed"):
        take_mirrored(URL, run.folder, IDENTITY)
    assert (RunCopies.at(URL).steps(), run.store.steps()) == ([theirs], [ours])


def test_a_copy_replaces_a_damaged_checkpoint_of_its_step(mirrored: LocalRun) -> None:
    (mirrored.store.folder / "step_4" / "trainer.safetensors").write_bytes(b"a broken disk")
    assert "step 4 is taken" in take_mirrored(URL, mirrored.folder, IDENTITY)[-1]
    assert load(mirrored.store.folder / "step_4").cut.step == 4


def test_a_changed_copy_is_skipped_and_without_a_whole_one_the_resume_is_refused(
    mirrored: LocalRun, tmp_path: Path
) -> None:
    copies = RunCopies.at(URL)
    (copies.place / "step_4/checkpoints/step_4/trainer.safetensors").write(b"other weights")
    notes = take_mirrored(URL, tmp_path / "one", IDENTITY)
    assert "copy of step 4 is skipped" in notes[0]
    assert Checkpoints(tmp_path / "one/checkpoints", 2).steps() == [2]
    (copies.place / "step_2" / LEDGER).remove()
    with pytest.raises(CheckpointError, match="step 2 is skipped"):
        take_mirrored(URL, tmp_path / "two", IDENTITY)


def test_a_store_that_does_not_answer_refuses_the_resume_and_takes_no_older_copy(
    mirrored: LocalRun, tmp_path: Path
) -> None:
    with (
        patch.object(RemoteFile, "download", side_effect=ConnectionError("gone")),
        pytest.raises(CheckpointError, match="cannot be read: gone"),
    ):
        take_mirrored(URL, tmp_path / "other", IDENTITY)


@pytest.mark.parametrize(
    "name", ["../x.json", "/x.json", "checkpoints/../../x.json", ".x.json", "x.py", "a/b.json"]
)
def test_no_name_in_a_copy_leads_out_of_the_run_directory(run: LocalRun, name: str) -> None:
    assert not may_be_copied(name)
    sync(run)
    listing = RunCopies.at(URL).place / "step_2" / LISTING
    files = json.loads(listing.read(10**6))
    listing.write(json.dumps(files | {name: files[LEDGER]}).encode())
    assert RunCopies.at(URL).newest() is None


def test_a_process_stops_once_another_one_mirrors_to_its_url(tmp_path: Path) -> None:
    old, new = LocalRun(tmp_path / "old"), LocalRun(tmp_path / "new")
    old.train(2)
    mirror = old.mirror()
    mirror._sync(False)
    take_mirrored(URL, new.folder, IDENTITY)
    new.train(4)
    sync(new)
    with pytest.raises(OSError, match="another process mirrors"):
        mirror._sync(False)
    assert RunCopies.at(URL).steps() == [2, 4]


def test_a_process_with_a_slow_upload_removes_no_copy_of_its_successor(tmp_path: Path) -> None:
    old, new = LocalRun(tmp_path / "old"), LocalRun(tmp_path / "new")
    old.train(2)
    mirror = old.mirror()
    mirror._sync(False)
    old.train(4)
    upload, first = RemoteFile.upload, threading.Semaphore(1)

    def slow(self: RemoteFile, source: Path) -> Any:
        if first.acquire(blocking=False):
            take_mirrored(URL, new.folder, IDENTITY)
            new.train(6)
            sync(new)
        return upload(self, source)

    with (
        patch.object(RemoteFile, "upload", slow),
        pytest.raises(OSError, match="another process mirrors"),
    ):
        mirror._sync(False)
    assert RunCopies.at(URL).complete("step_6") is not None
    assert RunCopies.at(URL).complete("step_4") is None


def test_a_failure_is_a_warning_and_is_mended_by_the_next_checkpoint(tmp_path: Path) -> None:
    run, said = LocalRun(tmp_path / "run"), list[tuple[str, str]]()
    run.train(2)
    mirror = run.mirror()
    mirror.notify = lambda text, level: said.append((level, text))
    with patch.object(RemoteFile, "upload", side_effect=PermissionError("no quota")):
        mirror._work([None])
    mirror.log(1, {})
    assert mirror.metrics["mirror/failures"] == 1
    assert said[0][0] == "warning"
    assert f"{URL} is not up to date, until the next checkpoint: no quota" in said[0][1]
    assert "credentials" in said[0][1]
    mirror._work([None])
    assert mirror.metrics["mirror/step"] == 2


def test_the_end_has_the_results_and_a_resume_elsewhere_finds_the_run_completed(
    run: LocalRun, tmp_path: Path
) -> None:
    ends(run)
    take_mirrored(URL, tmp_path / "other", IDENTITY)
    assert is_completed(tmp_path / "other")
    assert (tmp_path / "other/model/config.json").read_text() == "{}"


def test_a_run_completed_without_checkpoints_is_so_elsewhere(run: LocalRun, tmp_path: Path) -> None:
    ends(LocalRun(tmp_path / "bare"))
    assert "completed run is taken" in take_mirrored(URL, tmp_path / "other", IDENTITY)[0]
    assert is_completed(tmp_path / "other")
    assert not (tmp_path / "other/.mirror.partial").exists()
    refuse_another(tmp_path / "other", IDENTITY)  # it is known to be of this run
    with pytest.raises(ConfigError, match="holds another run"):
        take_mirrored(URL, run.folder, IDENTITY)  # and the end is not removed
    assert not is_completed(run.folder)
    (RemoteFile(URL) / END / "model" / "config.json").write(b"{ }")
    with pytest.raises(CheckpointError, match="was changed or cut off"):
        take_mirrored(URL, tmp_path / "third", IDENTITY)


def test_of_an_interrupted_run_no_model_is_taken_and_a_resumed_one_removes_its_end(
    run: LocalRun, tmp_path: Path
) -> None:
    ends(run, "interrupted")
    take_mirrored(URL, tmp_path / "other", IDENTITY)
    assert (tmp_path / "other/summary.json").exists()
    assert not (tmp_path / "other/model").exists()
    sync(run)
    assert RunCopies.at(URL).complete(END) is None


def test_a_completed_run_without_its_end_at_the_url_has_failed_and_hides_keys_of_errors(
    run: LocalRun, capsys: pytest.CaptureFixture[str]
) -> None:
    mirror = run.mirror()
    words = "s3://user:s3cr3t-of-mine@bucket/run refused AKIAABCDEFGHIJKLMNOP"
    refused = patch.object(RemoteFile, "upload", side_effect=PermissionError(words))
    with refused, RunLog(config(), run.folder, sinks=[], viewers=[mirror]) as log:
        mirror.notify, mirror.summarize = log.message, log.summarize
        assert log.finish("completed") == "failed"
    found = json.loads((run.folder / "summary.json").read_text())
    assert found["status"] == "failed"
    assert f"{URL} lacks the end of the run: " in found["error"]
    assert found["mirror/failures"] >= TRIES
    assert "tries left: 0" in (run.folder / "run.log").read_text()
    shown = capsys.readouterr().err + found["error"] + (run.folder / "run.log").read_text()
    assert shown.count("refused <hidden>") >= 3
    assert "s3cr3t-of-mine" not in shown
    assert "AKIAABCDEFGHIJKLMNOP" not in shown


def damaged(run: LocalRun, step: int) -> None:
    (run.store.folder / f"step_{step}" / "trainer.safetensors").write_bytes(b"other bytes")


def test_a_damaged_older_checkpoint_keeps_no_newer_one_from_the_url(tmp_path: Path) -> None:
    run, said = LocalRun(tmp_path / "run"), list[tuple[str, str]]()
    run.train(2)
    run.train(4)
    damaged(run, 2)
    mirror = run.mirror()
    mirror.notify = lambda text, level: said.append((level, text))
    mirror._work([None])
    with patch.object(RemoteFile, "upload", side_effect=AssertionError("uploaded again")):
        mirror._work([None])
    assert mirror.metrics["mirror/failures"] == 1
    assert mirror.close(summary("completed")) is None
    complete = RunCopies.at(URL).complete
    assert (complete("step_2"), complete("step_4") is None) == (None, False)
    assert [text for level, text in said if level == "warning"] == [
        f"mirror: {URL} gets no copy of step 2: checkpoints/step_2/trainer.safetensors is not as "
        "its manifest.json says"
    ]
    run.train(6)
    damaged(run, 6)  # the newest one: no copy is complete
    with pytest.raises(StageError, match=r"is not as its manifest.json says"):
        run.mirror().close(summary("completed"))


def test_an_upload_that_hangs_is_waited_for_within_a_bound(tmp_path: Path) -> None:
    run, answer, said = LocalRun(tmp_path / "run"), threading.Event(), list[str]()
    run.train(2)
    mirror = Mirror(run.store, RunCopies.at(URL), bound_s=0.05, grace_s=0.05)
    mirror.notify = lambda text, level: said.append(text)
    with patch.object(RemoteFile, "upload", side_effect=lambda source: answer.wait(60)):
        mirror.start()
        note = mirror.close(summary("interrupted"))
        assert "not uploaded in 0.05 s" in note
        with pytest.raises(StageError, match="not uploaded in"):
            mirror.close(summary("completed"))
        mirror.checkpoint(2, run.folder)
        assert "has not ended its upload within 0.05 s" in said[-1]
        answer.set()
        mirror._worker.close(20)


def test_a_signal_ends_the_wait_for_the_last_upload(tmp_path: Path) -> None:
    run, answer, first = LocalRun(tmp_path / "run"), threading.Event(), threading.Semaphore(1)
    run.train(2)
    mirror = Mirror(run.store, RunCopies.at(URL), bound_s=600, grace_s=600)

    def hang(source: Path) -> None:
        if first.acquire(blocking=False):
            os.kill(os.getpid(), signal.SIGTERM)
        answer.wait(60)
        raise ConnectionError

    before = signal.getsignal(signal.SIGTERM)
    with patch.object(RemoteFile, "upload", side_effect=hang):
        with pytest.raises(StageError, match="lacks the end of the run: a signal ended the wait"):
            mirror.close(summary("completed"))
        answer.set()
        mirror._worker.close(20)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        ({"checkpoint": {"mirror": "runs/a"}}, "expected a URL"),
        ({"checkpoint": {"mirror": "s3://key:s3cr3t-of-mine@bucket/a"}}, "holds a secret"),
        ({"run_dir": "s3://bucket/a"}, "a run writes to a directory of this machine"),
    ],
)
def test_a_mirror_is_a_url_without_keys_a_run_dir_is_not(given: dict[str, Any], cause: str) -> None:
    needed = {"student": {"model": "m"}, "teachers": {"t": {"model": "m"}}}
    with pytest.raises(ConfigError) as caught:
        load_config({**needed, "data": {"train": "a.jsonl"}, **given})
    assert cause in str(caught.value)
    assert "s3cr3t-of-mine" not in str(caught.value)
