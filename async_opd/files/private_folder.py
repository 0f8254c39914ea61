"""Directories that only the user of a run can write in, where other users of the machine work too.

exposed(path)                 why others could put something else in the place of a path
temporary_folder(prefix)      a new one (0700), for as long as a run lasts
private_compile_cache()       torch's compiled code: it is unpickled, and so may run anything
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
    """Who else than this user and root can replace what is there, or write in it; "" if nobody.

    Of a directory with the sticky bit, others cannot rename what is not theirs. OSError.
    """
    real = Path(os.path.realpath(path))
    for folder in (real, *real.parents):
        found = folder.stat()
        if found.st_uid not in (0, os.getuid()):
            return f"{folder} belongs to user {found.st_uid}"
        if found.st_mode & WRITABLE and (folder == real or not found.st_mode & stat.S_ISVTX):
            return f"others can write in {folder}"
    return ""


def temporary_folder(prefix: str, most_bytes: int) -> Path:
    """A new directory (0700) whose path is so short: sockets in it have names of 107 bytes at most.

    In ``RAY_TMPDIR`` if that is set, otherwise in the system's temporary directory or ``/tmp``.
    OSError that says why none of them will do.
    """
    named = os.environ.get(RAY_TMPDIR)
    against: dict[str, str] = {}
    for parent in [named] if named else dict.fromkeys((tempfile.gettempdir(), "/tmp")):
        try:
            folder = Path(os.path.realpath(tempfile.mkdtemp(prefix=prefix, dir=parent)))
        except OSError as error:
            against[parent] = error.strerror or str(error)
            continue
        against[parent] = exposed(folder)
        if not against[parent] and len(os.fsencode(folder)) > most_bytes:
            against[parent] = f"{folder} is longer than {most_bytes} bytes"
        if not against[parent]:
            return folder
        folder.rmdir()
    causes = "; ".join(f"{parent}: {cause}" for parent, cause in against.items())
    raise OSError(f"no temporary directory of its own: {causes}")


def private_compile_cache() -> None:
    """Names torch's compiler a directory of this user's, unless the environment does already.

    By default that is ``/tmp/torchinductor_USER``, which another user can make first. Triton's, of
    kernels that torch compiles, is below it; of other kernels it is in the home directory. Where
    the home directory will not do, it is a temporary one, for as long as this process lives.
    """
    if COMPILE_CACHE in os.environ:
        return
    try:
        folder = _user_cache() / "torchinductor"
        folder.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
        fits = os.access(folder, os.W_OK) and not exposed(folder)
    except (OSError, RuntimeError):  # RuntimeError: there is no home directory
        fits = False
    if not fits:
        folder = Path(tempfile.mkdtemp(prefix="async_opd_compiled_"))
        atexit.register(remove_tree, folder)
    os.environ[COMPILE_CACHE] = str(folder)


def _user_cache() -> Path:
    """As the XDG base directories have it: a path that is not absolute does not count."""
    named = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "async_opd"
