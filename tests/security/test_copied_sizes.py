"""A stranger's model of any size, with any files: an export neither fills the disk nor has them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.fuzz.command import Said, command
from tests.security.test_given_runs import EXAMPLE, forge, made, run_dir
from tests.security.test_terminal import TITLE, commands

__all__ = ["made", "run_dir"]  # fixtures

FREE = 1000
OTHERS = (
    *("pytorch_model.bin", "training_args.pt", "video.mp4", ".env", "original/config.json"),
    *("adapter/deeper/config.json", "archive.tar.gz"),
)


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk has space for half of ``FREE`` bytes."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=FREE))


def exported(run_dir: Path, source: str = "") -> Said:
    return command("export", str(run_dir / source), str(run_dir.parent / "out"))


def evaluated(run_dir: Path) -> Said:
    checkpoint, out = run_dir / "checkpoints" / "step_2", run_dir.parent / "out"
    return command("eval", str(EXAMPLE), str(checkpoint), "--out", str(out))


def refused(said: Said, run_dir: Path) -> bool:
    """Whether the figures and a remedy are named, and nothing is written."""
    assert f"bytes; {FREE} are free at {run_dir.parent}, of which {FREE // 2} stay free" in said.err
    assert "make space there, or name a directory on another disk" in said.err
    return said.code == 2 and not [one for one in run_dir.parent.iterdir() if "out" in one.name]


@pytest.mark.usefixtures("full")
def test_a_model_for_which_the_disk_has_no_space_is_not_exported(run_dir: Path) -> None:
    needed = sum(path.stat().st_size for path in (run_dir / "model").iterdir())
    said = exported(run_dir)
    assert f"{run_dir}/model has {needed} bytes" in said.err
    assert refused(said, run_dir)


@pytest.mark.usefixtures("full")
def test_a_checkpoint_for_whose_model_the_disk_has_no_space_is_not_exported(run_dir: Path) -> None:
    assert refused(exported(run_dir, "checkpoints/step_2"), run_dir)


@pytest.mark.usefixtures("full")
def test_a_checkpoint_for_whose_model_the_disk_has_no_space_is_not_evaluated(run_dir: Path) -> None:
    assert refused(evaluated(run_dir), run_dir)


def test_a_file_with_holes_counts_as_large_as_it_says(run_dir: Path) -> None:
    free = shutil.disk_usage(run_dir).free
    with (run_dir / "model" / "more.safetensors").open("wb") as file:
        file.truncate(free)
    said = exported(run_dir)
    assert (said.code, "stay free" in said.err) == (2, True)
    assert not (run_dir.parent / "out").exists()


def test_files_that_are_no_part_of_a_model_are_not_exported(run_dir: Path) -> None:
    for name in OTHERS:
        (run_dir / "model" / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / "model" / name).write_text("theirs")
    with pytest.warns(UserWarning, match="no part of a model has such a name") as caught:
        assert exported(run_dir).code == 0
    out = run_dir.parent / "out"
    assert [name for name in OTHERS if (out / name).exists()] == []
    shown = "".join(str(warning.message) for warning in caught)
    assert all(repr(name) in shown for name in OTHERS)


def test_all_that_a_run_writes_is_exported(run_dir: Path) -> None:
    model, out = run_dir / "model", run_dir.parent / "out"
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "tools.jinja").touch()
    for name in ("merges.txt", "tokenizer.model", "qwen.tiktoken", "code_of_mine.py", "LICENSE"):
        (model / name).touch()
    assert exported(run_dir).code == 0
    files = {path.relative_to(model) for path in model.rglob("*")}
    assert {path.relative_to(out) for path in out.rglob("*")} == files | {Path("README.md")}


def test_a_large_file_of_the_student_does_not_fill_the_disk(run_dir: Path) -> None:
    for name in ("a.txt", "b.txt", "c.txt"):
        with (run_dir.parent / "student" / name).open("wb") as file:
            file.truncate(2 << 20 if name == "a.txt" else 2 << 30)
    with pytest.warns(UserWarning, match="'[bc].txt', with its smaller files it has more than"):
        assert exported(run_dir, "checkpoints/step_2").code == 0
    assert [path.name for path in (run_dir.parent / "out").glob("?.txt")] == ["a.txt"]
    assert os.path.getsize(run_dir.parent / "out" / "a.txt") == 2 << 20


def test_the_warning_about_it_does_not_command_the_terminal(run_dir: Path) -> None:
    student = (run_dir.parent / "student").rename(run_dir.parent / f"student{TITLE}")
    forge(run_dir, lambda tree: tree["student"].update(model=f"../{student.name}"))
    with (student / f"{TITLE}.txt").open("wb") as file:
        file.truncate(2 << 30)
    with pytest.warns(UserWarning, match="not copied") as caught:
        assert exported(run_dir, "checkpoints/step_2").code == 0
    assert commands("".join(str(warning.message) for warning in caught)) == []


def test_a_trained_model_has_no_file_that_no_part_of_a_model_is_called(run_dir: Path) -> None:
    names = ("hf_quant_config.json", "program", "merges.txt")
    for name in names:
        (run_dir.parent / "student" / name).write_text("{}")
    assert exported(run_dir, "checkpoints/step_2").code == 0
    found = {path.name for path in (run_dir.parent / "out").iterdir()}
    assert found & set(names) == {"merges.txt"}
