"""A run directory that is read where it lies, or in a temporary copy of what is at a URL.

URL ──► its end, or else its newest step          URL/step_N, URL/end ──► that copy
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from async_opd.checkpoint.run_copies import END, TEACHERS, RunCopies
from async_opd.checkpoint.store import CONFIG, EVALUATED, FOLDER
from async_opd.config.paths import is_url
from async_opd.core.errors import CheckpointError, ConfigError, Problem
from async_opd.data.stored_rows import temporary_folder
from async_opd.files.foreign import DOCUMENT_BYTES, RECORD_BYTES, ForeignPath

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
