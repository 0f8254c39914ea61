"""Files below a directory that somebody else may have filled: the only way to them.

    ForeignPath(run_dir) / "media" / name ──open, read, held──► the content of a regular file
                      └──entries, walk, stat──► what is there

A downloaded or shared directory may have a link to any file that its reader can read. Therefore no
link and no ``..`` is followed below it, pipes and devices are not read, and a read has a bound. The
type is not an ``os.PathLike``: nothing but its methods opens what it names.

Numbers in files that somebody else may have written: those that can be added and shown.

JSON has integers of any length, and Python reads NaN, Infinity and 1e999 in it: one of them in a
sum or as a time would end the command that reads it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import IO, Any

from async_opd.files.safe_open import LINK, NO_FILE

DOCUMENT_BYTES = 16 << 20
"""Most of a file that is read as a whole: as JSON it may take 20 times as much memory."""
RECORD_BYTES = 2 << 30
"""Most of one that grows with each step of a run, and is read line by line."""
HELD_BYTES = 1 << 30
"""Most of one whose lines are all held in memory."""
LINE_BYTES = 16 << 20
LINE_COST = 256
"""Bytes that a line counts more than it has: as much memory, at least, holds what it says."""
MAX_PARTS = 64
OUTSIDE = "leads out of its directory, which is not followed: put the file itself there"
_HOW = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, order=True)
class ForeignPath:
    """A place below the directory ``root``, or that one itself. All methods raise OSError.

    Links on the way to the root are its user's own, and followed. ``own_links``: so are those
    below it that stay in it and lead to nothing hidden, and those of the hub's cache to the
    ``blobs`` of the same repository, as in directories of models and of data.
    """

    root: Path
    parts: tuple[str, ...] = ()
    own_links: bool = False

    def __truediv__(self, name: str) -> ForeignPath:
        """Refuses a name that leads elsewhere, or too deep."""
        parts = (*self.parts, *name.split("/"))
        if any(part in ("", ".", "..") or "\0" in part for part in parts) or len(parts) > MAX_PARTS:
            raise OSError(errno.EINVAL, OUTSIDE, f"{self}/{name}")
        return replace(self, parts=parts)

    def __str__(self) -> str:
        return str(self.root.joinpath(*self.parts))

    @property
    def within(self) -> str:
        """The place relative to the root, with slashes."""
        return "/".join(self.parts)

    @property
    def name(self) -> str:
        """The last part."""
        return self.parts[-1] if self.parts else self.root.name

    @property
    def suffix(self) -> str:
        """``.jsonl`` of ``train.jsonl``."""
        return PurePosixPath(self.name).suffix

    @property
    def stem(self) -> str:
        """``train`` of ``train.jsonl``."""
        return PurePosixPath(self.name).stem

    @property
    def parent(self) -> ForeignPath:
        """The folder that it is in; of the root that one itself."""
        return replace(self, parts=self.parts[:-1])

    def stat(self) -> os.stat_result:
        """Of a link its own."""
        handle = self._handle(os.O_PATH)
        try:
            return os.fstat(handle)
        finally:
            os.close(handle)

    def exists(self) -> bool:
        """Whether there is anything: also a link, which cannot be read."""
        return self._mode() != 0

    def is_file(self) -> bool:
        """Whether it is a regular file."""
        return stat.S_ISREG(self._mode())

    def is_dir(self) -> bool:
        """Whether it is a folder."""
        return stat.S_ISDIR(self._mode())

    def entries(self) -> list[ForeignPath]:
        """The entries of a folder, in the order of names; nothing if it does not exist."""
        try:
            handle = self._handle(os.O_RDONLY)
        except FileNotFoundError:
            return []
        try:
            names = os.listdir(handle)
        except OSError as error:
            raise self._named(error) from error
        finally:
            os.close(handle)
        return [self / name for name in sorted(names)]

    def walk(self) -> Iterator[ForeignPath]:
        """All that is below a folder but folders. Links are among it, and lead nowhere."""
        for entry in self.entries():
            if entry.is_dir():
                yield from entry.walk()
            else:
                yield entry

    def open(
        self, mode: str = "r", encoding: str | None = None, errors: str | None = None
    ) -> IO[Any]:
        """Opens a regular file for reading, as ``Path.open`` does; it never waits."""
        return open(str(self), mode, encoding=encoding, errors=errors, opener=self._opener)

    def read(self, most: int = DOCUMENT_BYTES) -> bytes:
        """The content of a regular file; OSError if it has more bytes."""
        with self.open("rb") as file:
            content: bytes = file.read(most + 1)
        if len(content) > most:
            raise OSError(errno.EFBIG, f"has more than {most} bytes", str(self))
        return content

    def lines(self, most: int = RECORD_BYTES) -> Iterator[str]:
        """The lines of a regular file; bytes that are not UTF-8 are replaced in them.

        OSError if one has more than ``LINE_BYTES``, or all together count more than ``most``.
        """
        left = most
        with self.open("rb") as file:
            while line := file.readline(LINE_BYTES + 1):
                left -= len(line) + LINE_COST
                if len(line) > LINE_BYTES or left < 0:
                    what = f"a line of more than {LINE_BYTES}" if left >= 0 else f"more than {most}"
                    raise OSError(errno.EFBIG, f"has {what} bytes", str(self))
                yield line.decode(errors="replace")

    @contextmanager
    def held(self) -> Iterator[str]:
        """A name of the opened file, for libraries that open by name."""
        with self.open("rb") as file:
            yield f"/proc/self/fd/{file.fileno()}"

    def remove(self) -> None:
        """Removes a file, or a link without its target, if there is one."""
        with suppress(FileNotFoundError):
            handle = self.parent._handle(os.O_RDONLY)
            try:
                os.unlink(self.name, dir_fd=handle)
            finally:
                os.close(handle)

    def as_path(self) -> Path:
        """The place for libraries that open it by name, after no link was found on the way.

        They follow links below it, and one that is put there later: ``held`` is better for a file.
        """
        if stat.S_ISLNK(self.stat().st_mode):
            raise OSError(errno.ELOOP, LINK, str(self))
        return Path(str(self))

    def _mode(self) -> int:
        with suppress(FileNotFoundError, NotADirectoryError):
            return self.stat().st_mode
        return 0

    def _opener(self, path: str, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR):
            raise OSError(errno.EROFS, "is only read", path)
        handle = self._handle(flags)
        kind = os.fstat(handle).st_mode
        if not stat.S_ISREG(kind):
            os.close(handle)
            number = errno.EISDIR if stat.S_ISDIR(kind) else errno.EINVAL
            raise OSError(number, os.strerror(number) if number == errno.EISDIR else NO_FILE, path)
        return handle

    def _handle(self, flags: int) -> int:
        """Opens part after part, each below the one before."""
        place = self._without_own_links() if self.own_links else self
        try:
            if not place.parts:  # a file that is the place itself must not be a link, a folder may
                file = flags != os.O_PATH and not os.path.isdir(place.root)
                return os.open(place.root, flags | (_HOW if file else os.O_CLOEXEC))
            handle = os.open(place.root, os.O_PATH | os.O_CLOEXEC)
            for number, part in enumerate(place.parts, 1):
                last = number == len(place.parts)
                try:
                    below = os.open(part, (flags if last else os.O_PATH) | _HOW, dir_fd=handle)
                finally:
                    os.close(handle)
                handle = below
                if not last and stat.S_ISLNK(os.fstat(handle).st_mode):
                    os.close(handle)
                    raise OSError(errno.ELOOP, LINK)
        except OSError as error:
            raise self._named(error) from error
        return handle

    def _named(self, error: OSError) -> OSError:
        """The error with the whole place in its text."""
        words = {errno.ELOOP: LINK, errno.ENXIO: NO_FILE}.get(error.errno or 0, error.strerror)
        return OSError(error.errno, words, str(self))

    def _without_own_links(self) -> ForeignPath:
        """Where the links lead that may be followed. OSError for any other one."""
        home = Path(os.path.realpath(self.root))
        real = Path(os.path.realpath(home.joinpath(*self.parts)))
        if real.is_relative_to(home):
            inner = real.relative_to(home).parts
            if not any(part.startswith(".") for part in inner):
                return ForeignPath(home, inner)
        for blobs in _blobs(home):
            if real.is_relative_to(blobs):
                return ForeignPath(blobs, real.relative_to(blobs).parts)
        raise OSError(errno.ELOOP, OUTSIDE, str(self))


Place = Path | ForeignPath
"""A directory or file that was given as it is, or a place below one."""


def foreign(place: Place | str) -> ForeignPath:
    """The place, below which nothing but its own methods opens a file; ranks get it as a text."""
    return place if isinstance(place, ForeignPath) else ForeignPath(Path(place))


def _blobs(home: Path) -> Iterator[Path]:
    """Folders that ``models--<owner>--<name>/snapshots/<commit>`` may link to: ``…/blobs``."""
    for folder in (home, *home.parents):
        repository = folder.parent.parent
        kind = repository.name.partition("--")[0]
        if folder.parent.name == "snapshots" and kind in ("models", "datasets"):
            yield repository / "blobs"
