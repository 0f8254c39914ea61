"""The copies at a mirror's URL, of somebody else: a resume takes data, and neither config nor code.

Such a copy can have any listing: the size and SHA-256 of each file are as it says.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from async_opd.checkpoint.earlier_run import is_completed, take_mirrored
from async_opd.checkpoint.resume import identity
from async_opd.checkpoint.run_copies import END, LISTING, RunCopies, may_be_copied
from async_opd.core.errors import CheckpointError, ConfigError
from async_opd.files.durable import written_file
from async_opd.files.foreign import MAX_PARTS
from async_opd.files.remote import RemoteFile
from async_opd.observability.logged_run import LoggedRun
from tests.checkpoint.test_mirror import IDENTITY, URL, LocalRun, sync
from tests.checkpoint.test_store import ROWS
from tests.world.config import run_config as config

pytestmark = pytest.mark.usefixtures("empty_store")

CODE = b"print('not of the user')\n"
DESCRIPTIONS = {
    "config.yaml": b"eval:\n  grader: model/g.py:f\n",
    "identity.json": b"{}",
    "origin.yaml": b"x: 1\n",
    "any.json": b"{}",
    "a.log": b"",
}
COMPLETED = {
    "summary.json": b'{"status": "completed"}',
    "run.json": b'{"run_format": 1}',
    "identity.json": IDENTITY.encode(),
    "model/config.json": b"{}",
}


def put(name: str, files: Mapping[str, bytes], scratch: Path) -> None:
    """Adds files to a copy, or replaces them, and its listing too."""
    place = RemoteFile(URL) / name
    listing = json.loads((place / LISTING).read(1 << 20)) if (place / LISTING).exists() else {}
    for file, content in files.items():
        scratch.write_bytes(content)
        written = written_file(scratch)
        listing[file] = {"bytes": written.bytes, "sha256": written.sha256}
        (place / file).write(content)
    (place / LISTING).write(json.dumps(listing).encode())


@pytest.fixture
def mirrored(empty_store: None, tmp_path: Path) -> LocalRun:
    run = LocalRun(tmp_path / "run")
    run.train(2)
    sync(run)
    return run


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A run directory with descriptions that its user can trust."""
    folder = tmp_path / "here"
    folder.mkdir()
    for name in DESCRIPTIONS:
        (folder / name).write_text("of the user")
    return folder


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def assert_descriptions_stay(folder: Path) -> None:
    assert {(folder / name).read_text() for name in DESCRIPTIONS} == {"of the user"}


@pytest.mark.usefixtures("mirrored")
def test_a_copy_of_a_step_replaces_no_description_of_the_run(here: Path, tmp_path: Path) -> None:
    put("step_2", DESCRIPTIONS, tmp_path / "scratch")
    assert "step 2 is taken" in take_mirrored(URL, here, IDENTITY)[-1]
    assert_descriptions_stay(here)


def test_no_file_of_a_copy_is_put_behind_a_link_of_the_run_directory(
    here: Path, tmp_path: Path
) -> None:
    (tmp_path / "outside").mkdir()
    (here / "model").symlink_to(tmp_path / "outside")
    put(END, COMPLETED | {"model/a/b.json": b"{}"}, tmp_path / "scratch")
    with contextlib.suppress(OSError, CheckpointError):
        take_mirrored(URL, here, IDENTITY)
    assert files_in(tmp_path / "outside") == set()


def test_a_copy_of_the_end_replaces_no_description_of_the_run(here: Path, tmp_path: Path) -> None:
    others = {name: content for name, content in DESCRIPTIONS.items() if name != "identity.json"}
    put(END, COMPLETED | others, tmp_path / "scratch")
    assert "completed run is taken" in take_mirrored(URL, here, IDENTITY)[0]
    assert_descriptions_stay(here)
    assert is_completed(here)


@pytest.mark.usefixtures("mirrored")
def test_of_a_step_and_its_end_only_files_that_a_run_writes_there_are_taken(
    here: Path, tmp_path: Path
) -> None:
    before = files_in(here)
    code = ("teachers/g.py", "teachers/version_1/modeling.py", "model/x.py", "best/pickle.bin")
    others = (*code, "checkpoints/step_9/a.safetensors", "checkpoints/g.py", "evals/a.py")
    put("step_2", dict.fromkeys(others, CODE), tmp_path / "scratch")
    taken = {"teachers/version_1/model.safetensors": b"", "teachers/version_1/merges.txt": b""}
    put("step_2", taken, tmp_path / "scratch")
    evals = {"evals/step_2.jsonl": b"", "media/a.png": b"", "microscope/step_2.rank_0.npz": b""}
    put(END, COMPLETED | evals | dict.fromkeys(others, CODE), tmp_path / "scratch")
    take_mirrored(URL, here, IDENTITY)
    found = files_in(here) - before
    ours = {name for name in found if name.startswith("checkpoints/step_2/")}
    assert {path.rpartition(".")[2] for path in ours} == {"json", "safetensors"}
    results = {"summary.json", "model/config.json", "ledger.jsonl"}
    assert found - ours == {*taken, *evals, *results}


def test_a_completed_end_without_the_runs_identity_is_no_success(
    here: Path, tmp_path: Path
) -> None:
    (here / "identity.json").unlink()
    put(END, {k: v for k, v in COMPLETED.items() if k != "identity.json"}, tmp_path / "scratch")
    with pytest.raises(ConfigError, match="has no identity"):
        take_mirrored(URL, here, IDENTITY)
    assert not is_completed(here)


def test_a_completed_end_of_another_config_is_no_success(here: Path, tmp_path: Path) -> None:
    other = identity(config(seed=1), ROWS).encode()
    put(END, COMPLETED | {"identity.json": other}, tmp_path / "scratch")
    with pytest.raises(ConfigError, match="seed"):
        take_mirrored(URL, here, IDENTITY)
    assert not is_completed(here)


def test_an_end_that_is_not_completed_and_of_another_config_keeps_no_run_from_beginning_again(
    here: Path, tmp_path: Path
) -> None:
    other = {"summary.json": b'{"status": "failed"}'}
    other["identity.json"] = identity(config(seed=1), ROWS).encode()
    put(END, COMPLETED | other, tmp_path / "scratch")
    assert take_mirrored(URL, here, IDENTITY) == []


@pytest.mark.usefixtures("mirrored")
def test_a_completed_end_of_another_config_is_not_put_over_a_step(
    here: Path, tmp_path: Path
) -> None:
    other = identity(config(seed=1), ROWS).encode()
    put(END, COMPLETED | {"identity.json": other}, tmp_path / "scratch")
    notes = take_mirrored(URL, here, IDENTITY)
    assert "copy of the end is skipped" in notes[0]
    assert not is_completed(here)
    assert not (here / "model").exists()


@pytest.mark.parametrize("content", [b"\xff", b"[" * 100_000, b"[]", b'{"config": 1}'])
def test_an_identity_of_any_content_is_refused(here: Path, tmp_path: Path, content: bytes) -> None:
    put(END, COMPLETED | {"identity.json": content}, tmp_path / "scratch")
    with pytest.raises(ConfigError):
        take_mirrored(URL, here, IDENTITY)


@pytest.mark.usefixtures("mirrored")
def test_a_copy_of_another_format_replaces_nothing(here: Path, tmp_path: Path) -> None:
    before = files_in(here)
    put("step_2", {"run.json": b'{"run_format": 9}'}, tmp_path / "scratch")
    with pytest.raises(ConfigError, match="found 9"):
        take_mirrored(URL, here, IDENTITY)
    assert {name for name in files_in(here) if not name.startswith(".")} == before


@pytest.mark.usefixtures("mirrored")
def test_the_wandb_run_of_a_copy_is_continued_in_an_empty_directory(tmp_path: Path) -> None:
    content = b'{"id": "0123abcd", "rows": 3, "step": 2, "command": "x"}'
    put("step_2", {"wandb_run.json": content}, tmp_path / "scratch")
    take_mirrored(URL, tmp_path / "other", IDENTITY)
    assert LoggedRun.of(tmp_path / "other", "wandb") == LoggedRun("0123abcd", 3, 2)
    assert "command" not in (tmp_path / "other/wandb_run.json").read_text()


@pytest.mark.usefixtures("mirrored")
@pytest.mark.parametrize(("mine", "rows"), [("0123abcd", 3), ("fedcba98", 7)])
def test_the_wandb_run_of_a_directory_is_continued_and_not_replaced(
    here: Path, tmp_path: Path, mine: str, rows: int
) -> None:
    LoggedRun(mine, 7).write(here, "wandb")
    put("step_2", {"wandb_run.json": b'{"id": "0123abcd", "rows": 3}'}, tmp_path / "scratch")
    take_mirrored(URL, here, IDENTITY)
    assert LoggedRun.of(here, "wandb") == LoggedRun(mine, rows)


@pytest.mark.usefixtures("mirrored")
@pytest.mark.parametrize("content", [b'{"id": "../../x"}', b'{"id": "0123abcd\\n"}', b"["])
def test_a_wandb_run_with_another_kind_of_id_is_not_taken(tmp_path: Path, content: bytes) -> None:
    put("step_2", {"wandb_run.json": content}, tmp_path / "scratch")
    take_mirrored(URL, tmp_path / "other", IDENTITY)
    assert not (tmp_path / "other/wandb_run.json").exists()


@pytest.mark.parametrize("part", ["a\0b", "/".join(["a"] * MAX_PARTS)])
def test_a_name_that_no_run_directory_can_have_makes_a_copy_incomplete(
    tmp_path: Path, part: str
) -> None:
    assert not may_be_copied(f"evals/{part}/c.json")
    listing = {f"evals/{part}/c.json": {"bytes": 1, "sha256": "0" * 64}}
    (RemoteFile(URL) / END / LISTING).write(json.dumps(listing).encode())
    assert RunCopies.at(URL).complete(END) is None


def test_a_name_that_the_disk_refuses_is_an_error_of_ours(tmp_path: Path) -> None:
    put(END, COMPLETED | {"evals/" + "x" * 300 + ".jsonl": b""}, tmp_path / "scratch")
    with pytest.raises(CheckpointError, match="too long"):
        take_mirrored(URL, tmp_path / "other", IDENTITY)
