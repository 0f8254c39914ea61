"""The guardrail's rollbacks of a run that is mirrored: on fakes, with real files and copies."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from async_opd import training as trainings
from async_opd.accounting import lineage
from async_opd.accounting.audit import audit
from async_opd.accounting.lineage import add_roll_back, is_on_the_way, read_roll_backs
from async_opd.checkpoint import earlier_run, store
from async_opd.checkpoint import mirror as mirrors
from async_opd.checkpoint.checkpointer import Checkpointer
from async_opd.checkpoint.earlier_run import take_mirrored
from async_opd.checkpoint.mirror import Mirror
from async_opd.checkpoint.run_copies import RunCopies
from async_opd.checkpoint.store import Checkpoints
from async_opd.files.remote import RemoteFile
from async_opd.files.run_format import write_run_format
from async_opd.observability.sinks import Summary
from tests.test_resume import FORM
from tests.test_rewind import LIMITS, LONG, Mortal, train
from tests.world.trainer import FakeTrainer

STEPS, BAD = 12, 9
SHAPE = LONG | {"k": 1, "guardrail": LIMITS | {"window": 3, "max_truncated_share": 0.4}}
"""Goes back from step 9 to step 6, and leaves steps 7 and 8."""


class AtOnce:
    """A worker that works when it is asked, so that a kill and an error come at a known place."""

    def __init__(self, name: str, work: Callable[[list[None]], None], max_size: int) -> None:
        self._work = work
        self._error: Exception | None = None

    def put(self, item: None) -> bool:
        try:
            self._work([item])
        except Exception as error:
            self._error = error
        return True

    def close(self, timeout_s: float) -> bool:
        if self._error is not None:
            raise self._error
        return True


@pytest.fixture(autouse=True)
def _fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trainings, "identity", lambda config, rows: "{}")
    monkeypatch.setattr(earlier_run, "refuse_changes", lambda before, now: None)  # both are "{}"
    monkeypatch.setattr(mirrors, "BackgroundWorker", AtOnce)
    take, step = Checkpointer.take, FakeTrainer.step

    async def never_skipped(made: Checkpointer, cut_of: Any) -> None:
        await made.settled()
        await take(made, cut_of)
        await made.settled()

    async def degenerate(trainer: FakeTrainer) -> Any:
        done = await step(trainer)
        bad = done.step == BAD and trainer.lr_factor > 0.5
        metrics = FORM | {"train/truncated_share": float(bad), "loss/total": 1.0}
        return type(done)(done.step, done.trained, done.staleness, metrics, done.requeued)

    monkeypatch.setattr(Checkpointer, "take", never_skipped)
    monkeypatch.setattr(FakeTrainer, "step", degenerate)


class Killed(BaseException):
    """The process is gone: nothing after this line runs."""


URL_WRITES = [(RemoteFile, "write"), (RemoteFile, "remove"), (RemoteFile, "upload")]
DISK_WRITES = [(lineage, "write_atomically"), (store, "remove_tree")]


@contextmanager
def failing(
    error: BaseException, until: str, writes: Sequence[tuple[Any, str]], after: int = 0
) -> Iterator[None]:
    """Writes fail from a rollback on until this method of the mirror returns.

    The first ``after`` of them do not.
    """
    left, is_on, end = [after], [False], getattr(Mirror, until)

    def begins(*args: Any) -> int:
        is_on[0] = True
        return add_roll_back(*args)

    def over(*args: Any) -> Any:
        found = end(*args)
        is_on[0] = False
        return found

    def fails(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if is_on[0]:
                left[0] -= 1
                if left[0] < 0:
                    raise error
            return real(*args, **kwargs)

        return call

    with ExitStack() as patches:
        patches.enter_context(patch.object(trainings, "add_roll_back", begins))
        patches.enter_context(patch.object(Mirror, until, over))
        for place, name in writes:
            patches.enter_context(patch.object(place, name, fails(getattr(place, name))))
        yield


def killed_after(writes: int) -> AbstractContextManager[None]:
    """Kills the process at one of the writes of a rollback, here or at the URL."""
    return failing(Killed(), "rewind", [*URL_WRITES, *DISK_WRITES], writes)


def store_away() -> AbstractContextManager[None]:
    """Nothing can be written at the URL from a rollback on."""
    return failing(ConnectionError("the store is away"), "close", URL_WRITES)


@contextmanager
def killed_at(step: int, rewinds: int) -> Iterator[None]:
    """Kills a process when it has the checkpoint of a step, after so many rewinds."""
    begun, gone = [0], [False]
    checkpoint, rewind, close = Mirror.checkpoint, Mirror.rewind, Mirror.close

    def counted(mirror: Mirror) -> None:
        begun[0] += 1
        rewind(mirror)

    def kills(mirror: Mirror, at: int, folder: Path) -> None:
        if (at, begun[0]) == (step, rewinds):
            gone[0] = True
            raise Killed
        checkpoint(mirror, at, folder)

    def unless_gone(mirror: Mirror, summary: Summary) -> str | None:
        return None if gone[0] else close(mirror, summary)

    with (
        patch.object(Mirror, "rewind", counted),
        patch.object(Mirror, "checkpoint", kills),
        patch.object(Mirror, "close", unless_gone),
    ):
        yield


class Machine:
    """A run directory, with a mirror beside it."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.store = Checkpoints(folder / "checkpoints", 2)
        folder.mkdir(exist_ok=True)
        write_run_format(folder)

    def run(self) -> Mortal:
        """A process, from the newest checkpoint to the end of the run."""
        mirror = Mirror(self.store, RunCopies.at(self.url), 20, 20)
        return asyncio.run(train(self.folder, [], SHAPE, mirror=mirror))

    def killed(self) -> bool:
        """Whether a process was killed before the end."""
        try:
            self.run()
        except (Killed, BaseExceptionGroup):
            return True
        return False

    def take(self) -> int:
        """The step after which a resumed run goes on."""
        take_mirrored(self.url, self.folder, "{}")
        found = self.store.newest(lambda text: None)
        return found.cut.step

    def assert_one_way(self) -> None:
        """Each sample was trained once, and all checkpoints are of the newest one's past."""
        found = audit(self.folder)
        assert (found.lost, found.duplicated, found.steps) == ((), (), STEPS)
        ways = self.store.lineages()
        newest = ways[self.store.steps()[-1]]
        assert all(is_on_the_way(step, its, newest) for step, its in ways.items())


@pytest.fixture
def first(tmp_path: Path) -> Machine:
    return Machine(tmp_path / "first", f"file://{tmp_path}/bucket")


@pytest.mark.slow
def test_killed_at_any_write_of_a_rollback_a_run_goes_on_without_the_steps_that_it_has_left(
    tmp_path: Path,
) -> None:
    for writes in range(30):
        world = tmp_path / str(writes)
        world.mkdir()
        here = Machine(world / "first", f"file://{world}/bucket")
        with killed_after(writes):
            if not here.killed():
                break
        shutil.copytree(world / "bucket", world / "copied")
        other = Machine(world / "second", f"file://{world}/copied")
        known = {
            here: bool(read_roll_backs(here.folder)),
            other: bool(RunCopies.at(other.url).mirrored().roll_backs),
        }
        for machine, knows in known.items():
            assert machine.take() == (6 if knows else 8)
            resumed = machine.run()
            # without the record the guardrail judges again what it has found
            assert resumed.rewinds == (0 if knows else 1)
            assert resumed.world.trainer.lr_factor == 0.5
            assert len(read_roll_backs(machine.folder)) == 1
            machine.assert_one_way()
    assert 4 < writes < 29


def test_on_another_machine_a_copy_from_before_the_rollback_has_its_learning_rate(
    first: Machine, tmp_path: Path
) -> None:
    with killed_at(7, rewinds=1):
        assert first.killed()
    second = Machine(tmp_path / "second", first.url)
    assert second.take() == 6
    resumed = second.run()
    assert (resumed.rewinds, resumed.world.trainer.lr_factor) == (0, 0.5)


def test_while_the_store_is_away_the_directory_knows_the_steps_that_the_run_has_left(
    first: Machine,
) -> None:
    with store_away(), killed_at(7, rewinds=1):
        assert first.killed()
    text = (first.folder / "run.log").read_text()
    assert f"{first.url} does not have the rollback yet: the store is away" in text
    assert RunCopies.at(first.url).steps()[-1] == 8
    assert first.take() == 7
    resumed = first.run()
    assert (resumed.rewinds, resumed.world.trainer.lr_factor) == (0, 0.5)
    first.assert_one_way()


def test_once_the_store_is_back_another_machine_knows_them_too(
    first: Machine, tmp_path: Path
) -> None:
    with store_away(), killed_at(7, rewinds=1):
        assert first.killed()
    copies = RunCopies.at(first.url)
    with killed_at(8, rewinds=0), patch.object(RunCopies, "remove", lambda *_: None):
        assert first.killed()
    assert copies.steps()[-1] == 8
    assert Machine(tmp_path / "second", first.url).take() == 7
