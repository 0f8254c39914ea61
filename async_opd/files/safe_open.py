"""Files of a run directory: opened without following links, for their owner's eyes only.

    open(path, mode, opener=regular_file)     a file that is there, or a new one (0600)
    make_folder(path)                         a directory that is there, or a new one (0700)
    remove_tree(path)                         a directory with all it holds; of a link the link
    private_files()                           what libraries write meanwhile is private too

Others may be able to write in the directory. A link in the place of a file would have a run append
to, or overwrite, whatever it names, and a pipe would hold up for ever who reads it.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700
PRIVATE_UMASK = 0o077
LINK = "is a symbolic link, which a run does not follow: remove it"
NO_FILE = "is no regular file: remove it"


def regular_file(path: str, flags: int) -> int:
    """An ``opener`` for ``open``. OSError that says so if the last part of the path is no file.

    A file that is made is its owner's alone; one that is there keeps its mode. Never waits.
    """
    strange = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        handle = os.open(path, flags | strange, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, LINK, path) from error
        if error.errno == errno.ENXIO:  # a pipe that nobody reads, or a socket
            raise OSError(errno.ENXIO, NO_FILE, path) from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, NO_FILE, path)
    return handle


def read_bytes(path: Path) -> bytes:
    """What a regular file holds. OSError."""
    with open(path, "rb", opener=regular_file) as file:
        return file.read()


def read_text(path: Path, errors: str = "strict") -> str:
    """What a regular file holds, as UTF-8. OSError, UnicodeDecodeError."""
    return read_bytes(path).decode(errors=errors)


def make_folder(path: Path) -> None:
    """A directory of a run, its owner's alone if it is made here.

    OSError if a link, or something else than a directory, is there.
    """
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    refuse_link(path)


def refuse_link(path: Path) -> None:
    """OSError that says so if the path is a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(path))


def remove_tree(path: Path) -> None:
    """As ``shutil.rmtree`` without errors; of a link, the link and not what it names."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def private_files() -> Iterator[None]:
    """Files that this process or a child of it makes meanwhile are their owner's alone."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)
