"""The directory and the token of a local run's Ray, removed when the run ends.

    FOLDER/           0700: other users cannot enter it
      token           0600: a process with the token can run code in the cluster
      ray/session_*/  Ray's sockets, ports and logs, 0777 whatever the umask says

Ray trusts the files in its directory: another user with write access could choose where its
processes listen, and make them run any code.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from async_opd.core.errors import StageError
from async_opd.files.private_folder import temporary_folder
from async_opd.files.safe_open import make_folder, regular_file, remove_tree

MAX_BYTES = 107 - len("/ray/session_2026-01-01_00-00-00_000000_1234567/sockets/plasma_store.1")
"""Maximal bytes of the directory's path: the system allows 107 for a socket's."""
TOKEN, TOKEN_PATH = "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"
LOGS = "ray_logs"
"""Folder in the directory of a run."""
WORKER_LOGS = "worker-*"
"""Logs of the run's own processes: engines, stages, ranks."""
FAILED_CHECK = "Check failed: "
LOG_BYTES = 1 << 20
MAX_LOGS = 200


@dataclass(frozen=True)
class RayFolder:
    """A directory (0700) for Ray and its token."""

    path: Path

    @property
    def session(self) -> Path:
        """Ray's temporary directory, which Ray opens to all users that can enter ``path``."""
        return self.path / "ray"

    @property
    def _logs(self) -> Path:
        return self.session / "session_latest" / "logs"

    @property
    def token(self) -> Path:
        """A file with the token."""
        return self.path / "token"

    def keep_logs(self, run_dir: Path, pattern: str = "*") -> None:
        """Copies the end of each of Ray's logs of these names into the run directory.

        Raises OSError.
        """
        target = run_dir / LOGS
        remove_tree(target)
        make_folder(target)
        for log in self._newest(pattern):
            with suppress(OSError), open(log, "rb", opener=regular_file) as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - LOG_BYTES))
                with open(target / log.name, "wb", opener=regular_file) as copy:
                    copy.write(file.read(LOG_BYTES))

    def stream_logs(self, run_dir: Path) -> None:
        """Appends to the copies of the workers' logs what these have written since, up to a bound.

        Copies of older logs than the MAX_LOGS newest are removed, those of an earlier part too.
        The copies are in the run directory, to inspect a live run; ``keep_logs`` replaces
        them by the ends of the logs. Raises OSError.
        """
        target = run_dir / LOGS
        make_folder(target)
        newest = self._newest(WORKER_LOGS)
        for copied_log in set(target.iterdir()) - {target / log.name for log in newest}:
            copied_log.unlink()
        for log in newest:
            with (
                suppress(OSError),
                open(log, "rb", opener=regular_file) as file,
                open(target / log.name, "ab", opener=regular_file) as copy,
            ):
                file.seek(copied := copy.tell())
                copy.write(file.read(max(LOG_BYTES - copied, 0)))

    def raylet_error(self) -> str:
        """The failed check that ended the raylet, as its log has it; empty if there is none."""
        log = self._logs / "raylet.err"
        with suppress(OSError), open(log, errors="replace", opener=regular_file) as file:
            for line in file.read(LOG_BYTES).splitlines():
                if FAILED_CHECK in line:
                    return line.partition(FAILED_CHECK)[2].strip()
        return ""

    def _newest(self, pattern: str) -> list[Path]:
        """The logs that were written to last, MAX_LOGS at most."""
        times = list[tuple[float, Path]]()
        for log in self._logs.glob(pattern):
            with suppress(OSError):  # a link to nothing
                times.append((log.stat(follow_symlinks=False).st_mtime, log))
        return [log for _, log in sorted(times)[-MAX_LOGS:]]


@contextmanager
def ray_folder() -> Iterator[RayFolder]:
    """A folder for the time of a local cluster; environment variables give its token's path.

    StageError if no directory is private and has a short path.
    """
    try:
        folder = RayFolder(temporary_folder("opd_", MAX_BYTES))
    except OSError as error:
        remedy = "RAY_TMPDIR names a directory with a short path that others cannot replace"
        raise StageError("cluster", str(error), remedy) from error
    try:
        with open(folder.token, "w", opener=regular_file) as file:
            file.write(secrets.token_hex(32))
        with environment({TOKEN: None, TOKEN_PATH: str(folder.token)}):
            AuthenticationTokenLoader.instance().reset_cache()
            yield folder
    finally:
        AuthenticationTokenLoader.instance().reset_cache()
        remove_tree(folder.path)


@contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Sets variables, or removes those with None, for this process and its new child processes."""
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
