"""Copies of a run directory at a URL; each is a run directory by itself, complete or not one.

    URL/step_40/   metrics.jsonl, ledger.jsonl, config.yaml, …, checkpoints/step_40/…, files.json
    URL/end/       the same without a checkpoint, with model/, best/, evals/, microscope/, media/
    URL/roll_backs_2.json   ``roll_backs.json`` after the second rollback: copies that a rollback
                   has left are recognized by it, though they are still there

``files.json`` has the size and SHA-256 of every other file, and is written last: without it, or
with another content than these, nothing is taken for a copy. Nothing in a copy is unpickled.

``run_at`` gives a run directory where it lies, or in a temporary copy of what is at a URL:

    URL ──► its end, or else its newest step          URL/step_N, URL/end ──► that copy
"""

from __future__ import annotations

import errno
import hashlib
import re
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from pydantic import TypeAdapter, ValidationError

from async_opd.accounting.lineage import (
    Lineage,
    RollBack,
    is_on_the_way,
    lineage_of,
    longest,
    parse_roll_backs,
)
from async_opd.checkpoint.store import CONFIG, CUT, CUT_BYTES, EVALUATED, FOLDER, parse_cut
from async_opd.config.paths import is_url
from async_opd.core.errors import CheckpointError, ConfigError, Problem
from async_opd.core.reports import WrittenFile
from async_opd.data.stored_rows import temporary_folder
from async_opd.files.durable import without_space
from async_opd.files.foreign import DOCUMENT_BYTES, MAX_PARTS, RECORD_BYTES, ForeignPath
from async_opd.files.remote import Changed, RemoteFile
from async_opd.files.safe_open import make_folder
from async_opd.processes.background import each_of

LISTING, END, WRITER = "files.json", "end", "writer"
MAX_LISTING_BYTES, MAX_WRITER_BYTES, MAX_ROLL_BACKS_BYTES = 64 << 20, 64, 16 << 20
AT_ONCE = 4
"""Files of a copy that are transferred at the same time."""
TEACHERS = "teachers"
RESULTS = ("model", "best", "evals", "microscope", "media")
"""Folders that only the copy of the end has."""
_ROLL_BACKS = re.compile(r"roll_backs_(\d{1,9})\.json")
_SUFFIXES = (".json", ".jsonl", ".yaml", ".log")
_LOCAL = {"trace.json", "live.json", "dashboard.json"}

Files = dict[str, WrittenFile]
_Listing = TypeAdapter(Files)


def name_of(step: int) -> str:
    """The name of the copy with a step's checkpoint."""
    return f"step_{step}"


def may_be_copied(name: str) -> bool:
    """Whether a path relative to the run directory belongs into a copy, and leads nowhere else."""
    folder, _, rest = name.partition("/")
    parts = name.split("/")
    if len(parts) > MAX_PARTS or "\0" in name or "\\" in name:
        return False
    if any(not part or part.startswith(".") for part in parts):
        return False
    if not rest:
        return Path(name).suffix in _SUFFIXES and name not in {LISTING, *_LOCAL}
    return folder in (FOLDER, TEACHERS, *RESULTS)


def files_to_copy(run_dir: ForeignPath, *folders: str) -> dict[str, ForeignPath]:
    """The run directory's own files, and those below these folders, by name.

    Links among them are left out. OSError if one of the folders is a link.
    """
    found = [*run_dir.entries(), run_dir / FOLDER / EVALUATED]
    for folder in folders:
        found += (run_dir / folder).walk()
    return {one.within: one for one in found if may_be_copied(one.within) and one.is_file()}


class Copy(NamedTuple):
    """A complete copy."""

    name: str
    files: Files


@dataclass(frozen=True)
class Mirrored:
    """The complete copies with a checkpoint at a URL, by step, and the rollbacks noted there.

    ``lineages`` has those whose cut can be read.
    """

    copies: Sequence[tuple[int, Copy]]
    lineages: Mapping[int, Lineage]
    roll_backs: Sequence[RollBack]

    @property
    def lineage(self) -> Lineage:
        """That of the run, as far as it is known here."""
        return longest([lineage_of(self.roll_backs), *self.lineages.values()])

    def on_the_way(self, later: Lineage) -> list[tuple[int, Copy]]:
        """Copies that a run of this lineage comes from, and those whose lineage is not known."""
        return [
            (step, copy)
            for step, copy in self.copies
            if step not in self.lineages or is_on_the_way(step, self.lineages[step], later)
        ]


@dataclass(frozen=True)
class RunCopies:
    """The copies below a URL. All methods block, and raise OSError."""

    place: RemoteFile

    @classmethod
    def at(cls, url: str) -> RunCopies:
        """Those below this URL."""
        return cls(RemoteFile(url))

    def steps(self) -> list[int]:
        """Steps of all copies with a checkpoint, complete or not, in order."""
        names = (name for name in self.place.names() if name.startswith("step_"))
        numbers = (name.removeprefix("step_") for name in names)
        return sorted(int(one) for one in numbers if one.isdecimal() and len(one) < 16)

    def complete(self, name: str, most: int = MAX_LISTING_BYTES) -> Copy | None:
        """A copy, whose files are not read yet; None if it is not complete.

        ``Changed`` if its list of files has more bytes than ``most``.
        """
        try:
            files = _Listing.validate_json((self.place / name / LISTING).read(most))
        except (FileNotFoundError, ValidationError):  # the latter: of a write that was cut off
            return None
        fits = all(may_be_copied(name) and file.bytes >= 0 for name, file in files.items())
        return Copy(name, files) if fits else None

    def mirrored(self) -> Mirrored:
        """All complete copies with a checkpoint."""
        copies, left = list[tuple[int, Copy]](), MAX_LISTING_BYTES
        for step in self.steps():
            copy = self.complete(name_of(step), left)
            if copy is not None:
                copies.append((step, copy))
                left = max(left - len(_Listing.dump_json(copy.files)), 0)
        lineages, left = dict[int, Lineage](), CUT_BYTES
        for step, copy in copies:
            with suppress(FileNotFoundError, Changed, ValueError):  # the copy's reader reports it
                lineages[step], nbytes = self._lineage(step, copy, left)
                left -= nbytes
        return Mirrored(copies, lineages, self._roll_backs())

    def _lineage(self, step: int, copy: Copy, most: int) -> tuple[Lineage, int]:
        name = f"{FOLDER}/{name_of(step)}/{CUT}"
        if (expected := copy.files.get(name)) is None:
            raise FileNotFoundError(name)
        content = (self.place / copy.name / name).read(min(expected.bytes, most))
        if WrittenFile(len(content), hashlib.sha256(content).hexdigest()) != expected:
            raise Changed(name)
        return parse_cut(content).lineage, len(content)

    def newest(self) -> tuple[int, Copy] | None:
        """The newest complete copy with a checkpoint that the run has not left."""
        found = self.mirrored()
        return max(found.on_the_way(found.lineage), key=lambda one: one[0], default=None)

    def _roll_backs(self) -> list[RollBack]:
        """Those of the newest note that can be read: writing one may have been cut off."""
        for number in reversed(self._notes()):
            with suppress(FileNotFoundError, ValueError):
                return parse_roll_backs(self._note(number).read(MAX_ROLL_BACKS_BYTES))
        return []

    def note(self, content: bytes, number: int) -> None:
        """Notes all rollbacks of a run, so many; later ones, of another run, are removed."""
        for later in self._notes():
            if later > number:
                self._note(later).remove()
        if number:
            self._note(number).write(content)

    def _notes(self) -> list[int]:
        matches = map(_ROLL_BACKS.fullmatch, self.place.names())
        return sorted(int(match[1]) for match in matches if match)

    def _note(self, number: int) -> RemoteFile:
        return self.place / f"roll_backs_{number}.json"

    def upload(
        self, name: str, files: Mapping[str, ForeignPath], check: Callable[[Files], None]
    ) -> Files:
        """Makes a copy of local files. An error of ``check`` keeps it incomplete."""
        self.remove(name)
        sent = each_of(lambda one: (self.place / name / one).upload(files[one]), files, AT_ONCE)
        found = dict(zip(files, sent, strict=True))
        check(found)
        (self.place / name / LISTING).write(_Listing.dump_json(found))
        return found

    def download(self, copy: Copy, into: Path, wanted: Callable[[str], bool]) -> None:
        """Downloads files into an empty folder.

        ``Changed`` if one is not as ``files.json`` says; OSError if the store does not answer, or
        the disk has no room for the sizes that it says.
        """
        chosen = {name: file for name, file in copy.files.items() if wanted(name)}
        make_folder(into)
        if figures := without_space(sum(file.bytes for file in chosen.values()), into):
            message = f"{self.place / copy.name} says that it has {figures}"
            raise OSError(errno.ENOSPC, message, str(into))

        def one(name: str) -> None:
            (self.place / copy.name / name).download(into / name, chosen[name])

        try:
            each_of(one, chosen, AT_ONCE)
        except FileNotFoundError as error:
            raise Changed(f"{self.place / copy.name} lacks a file: {error}") from error

    def remove(self, name: str) -> None:
        """Removes a copy, its ``files.json`` first."""
        (self.place / name / LISTING).remove()
        (self.place / name).remove()

    def claim(self, writer: str) -> None:
        """Notes which process writes here from now on."""
        (self.place / WRITER).write(writer.encode())

    def claimed(self) -> bool:
        """Whether a process has ever claimed the URL: all that is written there follows that."""
        return (self.place / WRITER).exists()

    def refuse_other(self, writer: str) -> None:
        """OSError if another process has claimed the URL since."""
        found = b""
        with suppress(FileNotFoundError):
            found = (self.place / WRITER).read(MAX_WRITER_BYTES)
        if found != writer.encode():
            raise OSError(f"another process mirrors its run to {self.place} now")


_COPY = re.compile(rf"step_\d+|{END}")
Wanted = Callable[[str], bool]


def record(name: str) -> bool:
    """Whether a file of a copy is what a run recorded: neither a model nor a checkpoint's state."""
    heavy = (FOLDER, TEACHERS, "model", "best")
    return name == f"{FOLDER}/{EVALUATED}" or name.partition("/")[0] not in heavy


def record_and_weights(name: str) -> bool:
    """Whether a file of a copy is needed to write its student: all but records of samples."""
    return name.partition("/")[0] not in ("evals", "microscope", "media", TEACHERS)


@contextmanager
def run_at(place: str, wanted: Wanted = record) -> Iterator[ForeignPath]:
    """The directory, or a temporary one with the wanted files of a copy, each of them verified.

    ConfigError if there is no complete copy at the URL, CheckpointError if it cannot be read.
    """
    if not is_url(place):
        yield ForeignPath(Path(place))
        return
    with tempfile.TemporaryDirectory(prefix="async_opd_", dir=temporary_folder()) as folder:
        parts = (part for part in place.replace("://", "/").split("/") if part.strip("."))
        into = Path(folder, *parts)  # by which readers name the run
        try:
            found = _fetched(place.rstrip("/"), into, wanted)
        except OSError as error:
            remedy = "check the URL, its credentials, and the room in TMPDIR"
            raise CheckpointError("mirror", f"{place} cannot be read: {error}", remedy) from error
        if not found:
            message = f"{place} has no complete copy of a run"
            remedy = "name the checkpoint.mirror of a run, or a step_N in it"
            raise ConfigError([Problem("command line", "URL", message, remedy)])
        yield ForeignPath(into)


def _fetched(place: str, into: Path, wanted: Wanted) -> bool:
    """Downloads a copy. With that of the end comes the config of the newest checkpoint."""
    url, _, name = place.rpartition("/")
    copies, newest, copy = RunCopies.at(url), None, None
    if _COPY.fullmatch(name):
        copy = copies.complete(name)
    if copy is None:  # a mirror, whatever its name
        copies = RunCopies.at(place)
        newest = copies.newest()
        copy = copies.complete(END) or (newest and newest[1])
    if copy is None:
        return False
    for file, written in copy.files.items():
        most = DOCUMENT_BYTES if file.endswith((".json", ".yaml")) else RECORD_BYTES
        if record(file) and wanted(file) and written.bytes > most:
            raise OSError(
                f"its {file} has {written.bytes} bytes, more than the {most} that are read"
            )
    copies.download(copy, into, wanted)
    if newest is not None and copy.name == END:
        step, last = newest
        copies.download(last, into, lambda name: name == f"{FOLDER}/step_{step}/{CONFIG}")
    return True
