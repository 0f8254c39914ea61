"""A run directory in which others can write: no link is followed, no pipe waited for."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from async_opd.accounting.audit import AuditError, audit
from async_opd.accounting.journal import LEDGER, Journal
from async_opd.accounting.ledger import LedgerState
from async_opd.accounting.run_state import Cut
from async_opd.checkpoint.earlier_run import is_completed
from async_opd.checkpoint.resume import cut_files
from async_opd.checkpoint.store import Checkpoints, load
from async_opd.config.run_config import RunConfig
from async_opd.config.sections.log import LogConfig
from async_opd.core.errors import CheckpointError, StageError
from async_opd.core.samples import DeadLetter, Header
from async_opd.files.foreign import foreign
from async_opd.files.run_format import write_run_format
from async_opd.files.safe_open import private_files, regular_file, write_atomically
from async_opd.observability.logged_run import LoggedRun, file_of
from async_opd.observability.run_log import DEAD_LETTERS, METRICS, RunLog
from async_opd.observability.wandb_sink import WandbSink
from async_opd.processes.run_lock import run_lock
from tests.trainer.models import tiny_model
from tests.world.config import run_config
from trainer.saving.export import save_model

LONGEST_S = 30
"""Of a test: one that waits for a pipe would wait for ever."""
PRECIOUS = "what must stay as it is\n"
LETTER = DeadLetter(Header("p/0", 3, 0, 0, "t"), "student", "refused")
CUT = Cut(2, 1, 0, 0, LedgerState((), 2, 0, ()))

Use = Callable[[Path], object]
"""A run's writes to its directory."""


def config() -> RunConfig:
    return run_config(name="n", log={"console": "off", "wandb": "off"})


def runs(run_dir: Path) -> None:
    with RunLog(config(), run_dir) as log:
        log.log(1, {"loss/total": 1.0})
        log.dead_letter(LETTER)
        log.finish("completed")


def journals(run_dir: Path) -> None:
    with Journal(run_dir / LEDGER) as journal:
        journal.admitted(["p/0"])


def commits(run_dir: Path) -> Path:
    store = Checkpoints(run_dir / "checkpoints", 1)
    return store.commit(store.begin(CUT.step), CUT, "{}", {})


@pytest.fixture(autouse=True)
def nobody_waits() -> Iterator[None]:
    """Ends a test that reads a pipe, with an error."""

    def late(number: int, frame: object) -> None:
        raise AssertionError(f"waited for {LONGEST_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LONGEST_S)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def precious(tmp_path: Path) -> Path:
    file = tmp_path / "precious"
    file.write_text(PRECIOUS)
    return file


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


APPENDS = [
    (METRICS, runs),
    ("run.log", runs),
    (DEAD_LETTERS, runs),
    (LEDGER, journals),
    (METRICS, lambda run_dir: cut_files(run_dir, None)),
    (DEAD_LETTERS, lambda run_dir: cut_files(run_dir, None)),
]


@pytest.mark.parametrize(("name", "use"), APPENDS)
def test_a_link_in_the_place_of_a_file_is_refused_and_not_written_through(
    run_dir: Path, precious: Path, name: str, use: Use
) -> None:
    (run_dir / name).symlink_to(precious)
    with pytest.raises((StageError, OSError), match="symbolic link"):
        use(run_dir)
    assert precious.read_text() == PRECIOUS


@pytest.mark.parametrize(("name", "use"), APPENDS)
def test_a_pipe_in_the_place_of_a_file_is_refused_and_not_waited_for(
    run_dir: Path, name: str, use: Use
) -> None:
    os.mkfifo(run_dir / name)
    with pytest.raises((StageError, OSError), match="not a regular file"):
        use(run_dir)


def test_a_pipe_is_no_summary_and_no_record_of_wandb(run_dir: Path) -> None:
    os.mkfifo(run_dir / "summary.json")
    os.mkfifo(run_dir / file_of("wandb"))
    assert not is_completed(run_dir)
    assert LoggedRun.of(run_dir, "wandb").rows == 0


def test_a_pipe_is_no_ledger_to_audit(run_dir: Path) -> None:
    write_run_format(run_dir)
    os.mkfifo(run_dir / LEDGER)
    with pytest.raises(AuditError, match="not a regular file"):
        audit(run_dir)


def test_a_file_is_written_as_a_whole_beside_what_others_put_where_it_is_prepared(
    run_dir: Path, precious: Path
) -> None:
    partial = run_dir / f".config.yaml.{os.getpid()}.partial"
    partial.symlink_to(precious)
    write_atomically(run_dir / "config.yaml", "name: n\n")
    assert precious.read_text() == PRECIOUS
    assert (run_dir / "config.yaml").read_text() == "name: n\n"
    assert sorted(path.name for path in run_dir.iterdir()) == ["config.yaml"]


def test_a_link_in_the_place_of_the_summary_is_replaced(run_dir: Path, precious: Path) -> None:
    (run_dir / "summary.json").symlink_to(precious)
    runs(run_dir)
    assert precious.read_text() == PRECIOUS
    assert not (run_dir / "summary.json").is_symlink()


def test_checkpoints_are_not_written_to_where_a_link_leads(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    (elsewhere / "step_1").mkdir(parents=True)
    (run_dir / "checkpoints").symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        commits(run_dir)
    with pytest.raises(CheckpointError, match="symbolic link"):
        Checkpoints(run_dir / "checkpoints", 1).newest(lambda text: None)
    assert [path.name for path in elsewhere.iterdir()] == ["step_1"]


def test_a_checkpoint_is_not_prepared_where_a_link_leads(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run_dir / "checkpoints").mkdir()
    (run_dir / "checkpoints" / ".step_2.partial").symlink_to(elsewhere)
    assert commits(run_dir).is_dir()
    assert list(elsewhere.iterdir()) == []


def test_wandbs_files_are_not_written_to_where_a_link_leads(run_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (run_dir / "wandb").symlink_to(elsewhere)
    logged = config().model_copy(update={"log": LogConfig(wandb="offline")})
    with pytest.raises(OSError, match="symbolic link"):
        WandbSink(logged, run_dir).start()
    assert list(elsewhere.iterdir()) == []


def test_a_link_is_no_checkpoint(run_dir: Path, tmp_path: Path) -> None:
    real = commits(run_dir)
    real.rename(tmp_path / "step_2")
    real.symlink_to(tmp_path / "step_2")
    with pytest.raises(CheckpointError, match="symbolic link"):
        load(real)


@pytest.fixture(scope="module")
def student() -> Any:
    """Made before a test's alarm is set: the import of transformers takes its time."""
    return tiny_model(0)


def test_a_model_is_not_written_to_where_a_link_leads(
    run_dir: Path, tmp_path: Path, student: Any
) -> None:
    source, elsewhere = tmp_path / "source", tmp_path / "elsewhere"
    source.mkdir()
    elsewhere.mkdir()
    for name in ("model", "model.part", "model.old"):
        (run_dir / name).symlink_to(elsewhere)
    save_model(student, str(source), str(run_dir / "model"), [("w", torch.zeros(1))])
    assert list(elsewhere.iterdir()) == []
    assert (run_dir / "model" / "model.safetensors").is_file()


def modes(folder: Path) -> dict[str, int]:
    found = (folder, *folder.rglob("*"))
    return {str(p.relative_to(folder.parent)): stat.S_IMODE(p.stat().st_mode) for p in found}


def test_what_a_run_writes_is_its_owners_alone(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    before = os.umask(0)
    try:
        with run_lock(folder):
            runs(folder)
            journals(folder)
            commits(folder)
            LoggedRun.new().write(folder, "wandb")
    finally:
        os.umask(before)
    found = modes(folder)
    assert {METRICS, DEAD_LETTERS, LEDGER, file_of("wandb")} <= {Path(name).name for name in found}
    assert {name: oct(mode) for name, mode in found.items() if mode & 0o077} == {}


def test_what_libraries_write_during_a_run_is_its_owners_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with private_files():
            (tmp_path / "file").write_text("x")
        assert os.umask(0) == 0
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o600


def test_a_file_of_the_run_is_not_open_in_its_children(tmp_path: Path) -> None:
    with open(tmp_path / "file", "w", opener=regular_file) as file:
        assert not os.get_inheritable(file.fileno())


def test_a_file_is_read_as_it_is(precious: Path) -> None:
    assert foreign(precious).read() == PRECIOUS.encode()
