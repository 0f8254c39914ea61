"""Directories that only the user of a run can write in, on machines with several users.

exposed(path)                     the reason why other users could replace a path
temporary_folder(prefix, bytes)   makes a new directory (0700), for as long as a run lasts
private_compile_cache()           sets torch's compile cache: it is unpickled, so may run any code
"""

from __future__ import annotations

import atexit
import os
import stat
import tempfile
from pathlib import Path

from async_opd.files.safe_open import FOLDER_MODE, remove_tree

COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"
RAY_TMPDIR = "RAY_TMPDIR"
WRITABLE = stat.S_IWGRP | stat.S_IWOTH


def exposed(path: Path) -> str:
    """The reason why a user other than this one and root can write in, or replace, a path.

    The empty string if none can. OSError.
    """
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        status = folder.stat()
        if status.st_uid not in (0, os.getuid()):
            return f"{folder} belongs to user {status.st_uid}"
        # In a parent with the sticky bit (as /tmp) other users cannot rename this user's entries.
        if status.st_mode & WRITABLE and (folder == real or not status.st_mode & stat.S_ISVTX):
            return f"others can write in {folder}"
    return ""


def temporary_folder(prefix: str, max_bytes: int) -> Path:
    """A new directory (0700) with a path of at most ``max_bytes``: sockets' paths have at most 107.

    Its parent is ``RAY_TMPDIR`` if that is set, otherwise the system's temporary directory or
    ``/tmp``. OSError with the cause for each of them.
    """
    named = os.environ.get(RAY_TMPDIR)
    causes: dict[str, str] = {}
    for parent in [named] if named else dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        try:
            folder = Path(os.path.realpath(tempfile.mkdtemp(prefix=prefix, dir=parent)))
        except OSError as error:
            causes[parent] = error.strerror or str(error)
            continue
        causes[parent] = exposed(folder)
        if not causes[parent] and len(os.fsencode(folder)) > max_bytes:
            causes[parent] = f"{folder} is longer than {max_bytes} bytes"
        if not causes[parent]:
            return folder
        folder.rmdir()
    listed = "; ".join(f"{parent}: {cause}" for parent, cause in causes.items())
    raise OSError(f"no private temporary directory, set {RAY_TMPDIR} to another parent: {listed}")


def private_compile_cache() -> None:
    """Gives torch's compiler a cache directory of this user's, unless the environment names one.

    The default is ``/tmp/torchinductor_USER``, which another user can make first. The cache of
    Triton kernels that torch compiles is below it; other kernels' is in the home directory. If the
    home directory is not writable or not private, the cache is a temporary directory of this
    process.
    """
    if COMPILE_CACHE in os.environ:
        return
    try:
        folder = _user_cache() / "torchinductor"
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        private = os.access(folder, os.W_OK) and not exposed(folder)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        private = False
    if not private:
        folder = Path(tempfile.mkdtemp(prefix="async_opd_compiled_"))
        atexit.register(remove_tree, folder)
    os.environ[COMPILE_CACHE] = str(folder)


def _user_cache() -> Path:
    """The user's cache directory, by the XDG base directories: a relative path does not count."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "async_opd"
