"""Files of a run directory: links are not followed, new files are readable by their owner only.

    open(path, mode, opener=regular_file)     opens an existing file, or makes one (0600)
    write_atomically(path, content)              replaces a file as a whole
    make_folder(path)                         makes a directory (0700) if there is none
    remove_tree(path)                         removes a directory with its contents, or a link
    private_files()                           makes files that libraries write private too

Other users may be able to write in the directory. A run that followed a link there would append
to, or overwrite, the link's target, and reading a pipe would never end.
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
NO_FILE = "is not a regular file: remove it"


def regular_file(path: str, flags: int) -> int:
    """An ``opener`` for ``open`` that never waits. OSError if the path is not a regular file.

    A new file is readable by its owner only; an existing one keeps its mode.
    """
    try:
        handle = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, FILE_MODE)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, LINK, path) from error
        if error.errno == errno.ENXIO:  # a pipe without a reader, or a socket
            raise OSError(errno.ENXIO, NO_FILE, path) from error
        raise
    mode = os.fstat(handle).st_mode
    if not stat.S_ISREG(mode):
        os.close(handle)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
        raise OSError(errno.EINVAL, NO_FILE, path)
    return handle


def write_atomically(path: Path, content: str | bytes, durable: bool = True) -> None:
    """Writes text or bytes to a new file and renames it to ``path``.

    Readers see the old or the new one.

    ``durable``: the bytes are on the disk before the rename. OSError if they cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    partial.unlink(missing_ok=True)  # left by an earlier process with this id, or by another user
    try:
        with open(partial, "xb", opener=regular_file) as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def make_folder(path: Path) -> None:
    """Makes a directory (0700) if there is none. OSError for a link, or anything else there."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    refuse_link(path)


def refuse_link(path: Path) -> None:
    """OSError if the path is a link."""
    if path.is_symlink():
        raise OSError(errno.ELOOP, LINK, str(path))


def remove_tree(path: Path) -> None:
    """Removes a directory with its contents, ignoring errors; a link, without its target."""
    if path.is_symlink():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def private_files() -> Iterator[None]:
    """Makes files of this process and of children started meanwhile readable by the owner only."""
    before = os.umask(PRIVATE_UMASK)
    try:
        yield
    finally:
        os.umask(before)
