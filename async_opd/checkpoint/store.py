"""Checkpoints on disk: complete and unchanged, or not loaded.

    .step_N.partial/   the trainer writes its files, the driver cut.json, the manifest last
          │ every file and folder is on the disk (fsync)
          ▼ rename
    step_N/            manifest.json: size and SHA-256 of every other file
          │ the newest ``keep`` stay
          ▼
    step_N.damaged/    a file is missing, strange or changed: passed over, kept for a look

Calls block: they belong into a thread. Only JSON and safetensors: nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from async_opd.accounting.run_state import Cut
from async_opd.core.errors import CheckpointError
from async_opd.files.safe_open import (
    FOLDER_MODE,
    make_folder,
    read_bytes,
    read_text,
    refuse_link,
    regular_file,
    remove_tree,
)

CUT, MANIFEST, CONFIG = "cut.json", "manifest.json", "config.json"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified."""

    folder: Path
    cut: Cut
    config: str


@dataclass(frozen=True)
class _Entry:
    bytes: int
    sha256: str


_Manifest = TypeAdapter(dict[str, _Entry])
_Cut = TypeAdapter(Cut)


class Checkpoints:
    """The folder ``checkpoints/`` of a run directory."""

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder = folder
        self._keep = keep

    def begin(self, step: int) -> Path:
        """An empty folder to write into. OSError."""
        part = self.folder / f".step_{step}.partial"
        make_folder(self.folder)
        remove_tree(part)
        part.mkdir(mode=FOLDER_MODE)
        return part

    def commit(self, part: Path, cut: Cut, config: str) -> Path:
        """Makes the folder a checkpoint and forgets the oldest. OSError: nothing has changed.

        One that is there already has the same weights, and stays.
        """
        target = self.folder / f"step_{cut.step}"
        if target.exists():
            remove_tree(part)
            return target
        _write(part / CUT, _Cut.dump_json(cut))
        _write(part / CONFIG, config.encode())
        entries = {path.name: _entry(path) for path in sorted(part.iterdir())}
        _write(part / MANIFEST, _Manifest.dump_json(entries, indent=1))
        for path in (*part.iterdir(), part):
            _sync(path)
        part.rename(target)
        _sync(self.folder)
        for step in self.steps()[: -self._keep]:
            remove_tree(self.folder / f"step_{step}")
        return target

    def steps(self) -> list[int]:
        """Of every checkpoint, the oldest first."""
        return sorted(_steps(self.folder))

    def begun(self) -> set[int]:
        """Steps of all checkpoints, and of those that are being written."""
        parts = (part.name for part in self.folder.glob(".step_*.partial"))
        numbers = (name.removeprefix(".step_").removesuffix(".partial") for name in parts)
        return {*self.steps(), *(int(number) for number in numbers if number.isdecimal())}

    def newest(self, notify: Callable[[str], None]) -> Checkpoint | None:
        """The newest whose files are what was written; ``notify`` hears of those that are not.

        What was never finished is removed. CheckpointError if the folder is a link.
        """
        try:
            refuse_link(self.folder)
        except OSError as error:
            raise CheckpointError("checkpoint", str(error), "it could lead anywhere") from error
        for part in self.folder.glob(".step_*.partial"):
            remove_tree(part)
        for step in reversed(self.steps()):
            path = self.folder / f"step_{step}"
            try:
                return load(path)
            except CheckpointError as error:
                damaged = path.with_name(path.name + ".damaged")
                remove_tree(damaged)
                path.rename(damaged)
                notify(f"{error.cause}: it is passed over, and is now {damaged.name}")
        return None


def load(folder: Path) -> Checkpoint:
    """Verifies every byte. CheckpointError saying what is wrong."""
    try:
        refuse_link(folder)
        strange = [p.name for p in folder.iterdir() if p.is_symlink() or not p.is_file()]
        if strange:  # reading a pipe or a device might never end
            raise ValueError(f"{sorted(strange)} are no files")
        manifest = _Manifest.validate_json(read_bytes(folder / MANIFEST))
        found = {path.name for path in folder.iterdir()} - {MANIFEST}
        if found != set(manifest):
            raise ValueError(f"files {sorted(found ^ set(manifest))} are missing or strange")
        for name, entry in manifest.items():
            if _entry(folder / name) != entry:
                raise ValueError(f"{name} was changed or cut off")
        cut = _Cut.validate_json(read_bytes(folder / CUT))
        if folder.name != f"step_{cut.step}":
            raise ValueError(f"it says that it is of step {cut.step}")
        return Checkpoint(folder, cut, read_text(folder / CONFIG))
    except ValidationError as error:
        where = f"{CUT} or {MANIFEST} is not what was written ({error.error_count()} faults)"
        raise CheckpointError("checkpoint", f"{folder} is no checkpoint: {where}") from error
    except (OSError, ValueError) as error:
        raise CheckpointError("checkpoint", f"{folder} is no checkpoint: {error}") from error


def _steps(folder: Path) -> Iterator[int]:
    for path in folder.glob("step_*"):
        number = path.name.removeprefix("step_")
        if number.isdecimal() and path.name == f"step_{int(number)}" and path.is_dir():
            yield int(number)


def _entry(path: Path) -> _Entry:
    with open(path, "rb", opener=regular_file) as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return _Entry(file.tell(), digest)


def _write(path: Path, content: bytes) -> None:
    with open(path, "xb", opener=regular_file) as file:
        file.write(content)


def _sync(path: Path) -> None:
    """The file's bytes, or the folder's names, are on the disk when this returns."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
