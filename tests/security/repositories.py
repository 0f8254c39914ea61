"""A git repository of somebody else, whose configuration names a program."""

from __future__ import annotations

import subprocess
from pathlib import Path


def git(folder: Path, *arguments: str) -> str:
    """What git prints."""
    own = ("-c", "user.name=a", "-c", "user.email=a@b")
    done = subprocess.run(
        ["git", "-C", str(folder), *own, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def repository_with_code(tmp_path: Path) -> tuple[Path, Path]:
    """The repository, and the file that git makes if it runs the program, as ``status`` does."""
    folder, ran = tmp_path / "downloaded", tmp_path / "ran"
    folder.mkdir()
    git(folder, "init", "-q", ".")
    (folder / "file").touch()
    git(folder, "add", "file")
    git(folder, "commit", "-qm", "first")
    program = folder / ".git" / "program"
    program.write_text(f"#!/bin/sh\ntouch '{ran}'\n")
    program.chmod(0o755)
    git(folder, "config", "core.fsmonitor", ".git/program")
    return folder, ran
