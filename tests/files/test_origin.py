"""The commit of a run's origin: that of the package's own checkout, and of no other repository."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from async_opd.files import origin
from async_opd.files.origin import add_origin, read_origins
from tests.security.repositories import git, repository_with_code


def commit_of(package: Path, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> str:
    """The commit that is recorded of a run by the package in a folder."""
    monkeypatch.setattr(origin, "__file__", str(package / "files" / "origin.py"))
    add_origin(run_dir, ["run"])
    return read_origins(run_dir)[-1].commit


def test_the_commit_of_a_checkout_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = repository_with_code(tmp_path)
    package = folder / "async_opd"
    (package / "files").mkdir(parents=True)
    assert commit_of(package, monkeypatch, tmp_path) == git(folder, "rev-parse", "HEAD")
    assert not ran.exists()


def test_changes_of_a_checkout_are_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = repository_with_code(tmp_path)
    (folder / "async_opd" / "files").mkdir(parents=True)
    (folder / "file").write_text("changed")
    assert commit_of(folder / "async_opd", monkeypatch, tmp_path).endswith("+changes")


def test_a_repository_that_an_installation_lies_in_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, ran = repository_with_code(tmp_path)
    package = folder / ".venv" / "lib" / "site-packages" / "async_opd"
    (package / "files").mkdir(parents=True)
    assert commit_of(package, monkeypatch, tmp_path) == ""
    assert not ran.exists()


def test_a_broken_checkout_does_not_ask_the_repository_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = repository_with_code(tmp_path)
    package = folder / "inner" / "async_opd"
    (package / "files").mkdir(parents=True)
    shutil.copytree(folder / ".git" / "hooks", folder / "inner" / ".git")  # no repository
    assert commit_of(package, monkeypatch, tmp_path) == ""
