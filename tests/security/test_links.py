"""Links in a stranger's directory, or one that others can write in: none is followed out of it."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from async_opd.checkpoint.mirror import Mirror
from async_opd.checkpoint.run_copies import RunCopies
from async_opd.checkpoint.store import Checkpoints
from async_opd.config.sections.data import DataConfig
from async_opd.core.errors import SourceError, StageError
from async_opd.data.files import FileSource
from async_opd.data.hub import HubSource
from async_opd.data.stored_rows import read_source
from async_opd.files.kept_steps import KEPT, forget_steps, kept_files, kept_name
from async_opd.microscope import MICROSCOPE, forget_after, records
from async_opd.observability.loggers import MLflow, TensorBoard
from async_opd.observability.sinks import Summary
from async_opd.pictures import MEDIA, thumbnail_file
from tests.checkpoint.test_mirror import LocalRun
from tests.checks.inputs import config
from tests.fuzz.command import Said, command
from tests.security.hostile_data import GOOD, datasets_folder, lines
from tests.tools.test_export import run_of

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"


@pytest.fixture
def private(tmp_path: Path) -> Path:
    """A folder of the user's with a key."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "id_rsa").write_text(SECRET)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return run_of(tmp_path / "theirs")


def exported(run_dir: Path) -> Said:
    return command("export", str(run_dir), str(run_dir.parent / "out"))


@pytest.mark.parametrize("name", ["notes.txt", "assets", "adapter"])
def test_an_export_does_not_copy_where_a_link_in_the_model_leads(
    run_dir: Path, private: Path, name: str
) -> None:
    target = private / "id_rsa" if name == "notes.txt" else private
    (run_dir / "model" / name).symlink_to(target)
    said = exported(run_dir)
    assert said.code == 2
    assert f"{run_dir}/model/{name}" in said.err
    assert "symbolic link" in said.err
    assert not (run_dir.parent / "out").exists()


@pytest.mark.parametrize("name", ["model", "config.yaml", "run.json"])
def test_an_export_reads_no_part_of_a_run_directory_that_is_a_link(
    run_dir: Path, tmp_path: Path, name: str
) -> None:
    (run_dir / name).rename(tmp_path / "moved")
    (run_dir / name).symlink_to(tmp_path / "moved")
    assert exported(run_dir).code == 2
    assert not (run_dir.parent / "out").exists()


def test_a_checkpoint_that_is_a_link_is_not_exported(run_dir: Path, tmp_path: Path) -> None:
    step = run_dir / "checkpoints" / "step_2"
    step.rename(tmp_path / "step_2")
    step.symlink_to(tmp_path / "step_2")
    said = command("export", str(step), str(tmp_path / "out"))
    assert said.code == 2
    assert not (tmp_path / "out").exists()


def test_what_is_exported_is_its_owners_alone(run_dir: Path) -> None:
    (run_dir / "model" / "notes.txt").touch(0o644)
    assert exported(run_dir).code == 0
    modes = {path.name: path.stat().st_mode for path in (run_dir.parent / "out").rglob("*")}
    assert {name: oct(mode) for name, mode in modes.items() if stat.S_IMODE(mode) & 0o077} == {}


def mirrored(folder: Path, run: LocalRun, status: Any) -> str:
    """The content of the bucket after a run; errors of closing it are left out."""
    mirror = Mirror(run.store, RunCopies.at(f"file://{folder}/bucket"), 20, 20)
    try:
        mirror.close(Summary(status, None, 1, 1.0, run.folder))
    except StageError as error:
        assert "symbolic link" in error.cause  # noqa: PT017
    files = [path for path in (folder / "bucket").rglob("*") if path.is_file()]
    return "".join(path.read_text(errors="replace") for path in files)


@pytest.mark.parametrize("name", ["media", "teachers", "model", "evals", "microscope", "best"])
def test_a_mirror_gets_nothing_of_where_a_linked_folder_leads(
    tmp_path: Path, private: Path, name: str
) -> None:
    run = LocalRun(tmp_path / "run")
    run.train(2)
    (run.folder / name).symlink_to(private)
    (private / "version_0").mkdir()
    (private / "version_0" / "key.json").write_text(SECRET)
    assert SECRET not in mirrored(tmp_path, run, "completed")


def test_a_mirror_gets_nothing_that_a_manifest_names_elsewhere(
    tmp_path: Path, private: Path
) -> None:
    run = LocalRun(tmp_path / "run")
    run.train(2)
    manifest = run.folder / "checkpoints" / "step_2" / "manifest.json"
    named = json.loads(manifest.read_text())
    named["../../../home/id_rsa"] = named["cut.json"]
    manifest.write_text(json.dumps(named))
    mirror = Mirror(run.store, RunCopies.at(f"file://{tmp_path}/bucket"), 20, 20)
    with pytest.raises(StageError, match="leads out of its directory"):
        mirror.close(Summary("completed", None, 1, 1.0, run.folder))
    assert not [one for one in (tmp_path / "bucket").rglob("*") if "id_rsa" in one.name]


Use = Callable[[Path], object]
READS: dict[str, Use] = {
    MICROSCOPE: lambda run_dir: list(records(run_dir)),
    MEDIA: lambda run_dir: thumbnail_file(run_dir, "0" * 64),
    KEPT: kept_files,
    "checkpoints": lambda run_dir: Checkpoints(run_dir / "checkpoints", 1).steps(),
    "tensorboard": TensorBoard,
    "mlflow": lambda run_dir: MLflow(config(), run_dir),
}


@pytest.mark.parametrize("name", READS)
def test_a_folder_of_a_run_that_is_a_link_is_neither_read_nor_written_through(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    run_dir.mkdir()
    elsewhere.mkdir()
    (run_dir / name).symlink_to(elsewhere)
    with pytest.raises(OSError, match="symbolic link"):
        READS[name](run_dir)
    assert list(elsewhere.iterdir()) == []


def test_no_file_is_removed_where_a_linked_folder_leads(tmp_path: Path) -> None:
    names = {KEPT: kept_name(3, 0, 1), MICROSCOPE: "step_000003.rank_0.npz"}
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for folder, name in names.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / name).touch()
        (run_dir / folder).symlink_to(tmp_path / folder)
    with pytest.raises(OSError, match="symbolic link"):
        forget_steps(run_dir, lambda step: True)
    with pytest.raises(OSError, match="symbolic link"):
        forget_after(run_dir, 0)
    assert all((tmp_path / folder / name).exists() for folder, name in names.items())


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """A file of rows that are not the data set's."""
    folder = tmp_path / "home"
    folder.mkdir()
    lines(folder / "private.jsonl", [GOOD])
    return folder / "private.jsonl"


def read(source: Any) -> object:
    return read_source(source, 0, DataConfig(train=[]))


@pytest.mark.parametrize("name", ["train.jsonl", "data/train.jsonl"])
def test_rows_of_a_folder_are_not_read_through_a_link_out_of_it(
    tmp_path: Path, rows: Path, name: str
) -> None:
    link = tmp_path / "set" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(rows)
    with pytest.raises(SourceError, match="leads out of its directory"):
        read(HubSource(kind="hub", id=str(tmp_path / "set")))


def test_the_card_of_a_folder_is_not_read_through_a_link_out_of_it(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    lines(folder / "train.jsonl", [GOOD])
    (tmp_path / "notes.md").write_text("---\nconfigs: [{data_files: train.jsonl}]\n---\n")
    (folder / "README.md").symlink_to(tmp_path / "notes.md")
    with pytest.raises(SourceError, match="leads out of its directory"):
        read(HubSource(kind="hub", id=str(folder)))


@pytest.mark.parametrize("name", ["data.arrow", "state.json"])
def test_a_datasets_directory_is_not_read_through_a_link_out_of_it(
    tmp_path: Path, name: str
) -> None:
    import pyarrow

    kinds = {name: {"dtype": "string", "_type": "Value"} for name in GOOD}
    table = pyarrow.table({name: [value] for name, value in GOOD.items()})
    datasets_folder(tmp_path / "set", table, kinds)
    (tmp_path / "set" / name).rename(tmp_path / name)
    (tmp_path / "set" / name).symlink_to(tmp_path / name)
    with pytest.raises(SourceError, match="leads out of its directory"):
        read(FileSource(path=str(tmp_path / "set")))


def test_rows_of_a_copy_in_the_hubs_cache_are_read_through_its_links(tmp_path: Path) -> None:
    repository = tmp_path / "datasets--me--sums"
    snapshot = repository / "snapshots" / "c0ffee"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    lines(repository / "blobs" / "1", [GOOD])
    (snapshot / "train.jsonl").symlink_to("../../blobs/1")
    found = read_source(HubSource(kind="hub", id=str(snapshot)), 0, DataConfig(train=[]))
    assert [row.prompt for row in found] == [GOOD["prompt"]]
