"""Files behind URLs (``s3://…``, ``gs://…``, ``file://…``, ``memory://…``), through fsspec.

The only module that imports fsspec. Credentials come from where the store's own package looks for
them (environment, instance, files of the user), never from a config. All errors are OSError.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

from async_opd.core.errors import AsyncOPDError
from async_opd.core.reports import WrittenFile
from async_opd.files.foreign import ForeignPath, Place, foreign
from async_opd.files.safe_open import make_folder, refuse_link, regular_file

CHUNK = 8 << 20
"""Bytes that are read and written at once."""
INSTALL = "pip install 'async-opd[storage]'"


class Changed(OSError):
    """A file behind a URL that is not what was written."""


@contextmanager
def only_os_errors(url: str) -> Iterator[None]:
    """Errors of any kind, which the packages of the stores raise, become OSError with the cause."""
    try:
        yield
    except (OSError, AsyncOPDError):
        raise
    except ModuleNotFoundError as error:
        raise OSError(f"{url} needs the package {error.name}: {INSTALL}") from error
    except ImportError as error:  # fsspec's text says which package of the store to install
        raise OSError(f"{url} needs another package: {error}") from error
    except Exception as error:
        raise OSError(f"{url}: {type(error).__name__}: {error}") from error


class RemoteFile:
    """A file or folder at a URL, with those methods of ``Path`` that readers of files need.

    In a folder of this machine (``file://``) only regular files are opened, which never waits. The
    URL that was given may lead through links; no file below it is read or replaced through one.
    """

    def __init__(self, url: str, below: tuple[str, ...] = ()) -> None:
        """Connects to nothing. ``below`` are the parts of the URL below the one that was given."""
        self.url, self._below = url.rstrip("/"), below

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(f"{self.url}/{name}", (*self._below, name))

    @property
    def suffix(self) -> str:
        """``.jsonl`` of ``s3://bucket/train.jsonl``."""
        return PurePosixPath(self.url.partition("?")[0]).suffix

    @cached_property
    def _place(self) -> tuple[Any, str]:
        """The file system, and the path in it."""
        with only_os_errors(self.url):
            import fsspec

            found: tuple[Any, str] = fsspec.core.url_to_fs(self.url)
            return found

    @cached_property
    def _local(self) -> ForeignPath | None:
        """The place in a folder of this machine; None for a store. OSError."""
        files, path = self._place
        if "file" not in files.protocol:
            return None
        within = "/".join(self._below)
        given = ForeignPath(Path(os.path.realpath(path.removesuffix(f"/{within}"))))
        return given / within if within else given

    def _without_links(self, local: ForeignPath) -> Path:
        """The place, to be written or removed. OSError for a link between the given URL and it."""
        place = Path(str(local))
        depth = len(PurePosixPath("/".join(self._below)).parts)
        for folder in place.parents[: max(depth - 1, 0)]:
            refuse_link(folder)
        return place

    def connect(self) -> None:
        """OSError if no package for this kind of URL is installed. Most stores are not asked."""
        _ = self._place

    def exists(self) -> bool:
        """Whether there is a file, or a folder with files. OSError if the store does not answer."""
        files, path = self._place
        with only_os_errors(self.url):
            files.invalidate_cache()
            return bool(files.exists(path))

    def is_dir(self) -> bool:
        """Whether it is a folder with files. OSError."""
        files, path = self._place
        with only_os_errors(self.url):
            return bool(files.isdir(path))

    def open(
        self, mode: str = "r", encoding: str | None = None, errors: str | None = None
    ) -> IO[Any]:
        """Opens it as ``Path.open`` does; the bytes are there once it is closed. OSError."""
        files, path = self._place
        named = {} if encoding is None else {"encoding": encoding, "errors": errors}
        with only_os_errors(self.url):
            if (local := self._local) is None:
                opened: IO[Any] = files.open(path, mode, **named)
                return opened
            if "r" in mode:
                return local.open(mode, encoding, errors)
            written = self._without_links(local)
            make_folder(written.parent)
            return open(written, mode, encoding=encoding, opener=regular_file)

    def names(self) -> list[str]:
        """Names of the files and folders in a folder; none if it does not exist. OSError."""
        files, path = self._place
        with only_os_errors(self.url):
            files.invalidate_cache()
            try:
                found = files.ls(path, detail=False)
            except FileNotFoundError:
                return []
            return sorted({PurePosixPath(name).name for name in found})

    def read(self, most: int) -> bytes:
        """The content. FileNotFoundError; ``Changed`` if longer than ``most`` bytes; OSError."""
        with only_os_errors(self.url), self.open("rb") as file:
            content: bytes = file.read(most + 1)
        if len(content) > most:
            raise Changed(f"{self.url} has more than {most} bytes")
        return content

    def write(self, content: bytes) -> None:
        """Replaces the content. OSError."""
        with only_os_errors(self.url), self.open("wb") as file:
            file.write(content)

    def upload(self, source: Place) -> WrittenFile:
        """Writes a local file's bytes: those that it has now, though it may grow. OSError."""
        with (
            foreign(source).open("rb") as reading,
            only_os_errors(self.url),
            self.open("wb") as writing,
        ):
            return _copied(reading, writing, os.fstat(reading.fileno()).st_size)

    def download(self, target: Path, expected: WrittenFile) -> None:
        """Writes a new local file, and its folders. ``Changed`` if it is another; OSError."""
        with only_os_errors(self.url):
            make_folder(target.parent)
        with (
            only_os_errors(self.url),
            self.open("rb") as reading,
            open(target, "xb", opener=regular_file) as writing,
        ):
            if _copied(reading, writing, expected.bytes + 1) != expected:
                raise Changed(f"{self.url} was changed or cut off: its size or SHA-256 is another")

    def remove(self) -> None:
        """Removes a file, or a folder with all it has, if there is one. OSError."""
        files, path = self._place
        with only_os_errors(self.url):
            files.invalidate_cache()
            local = self._local
            try:
                if local is None:
                    files.rm(path, recursive=True)
                elif (place := self._without_links(local)).is_dir() and not place.is_symlink():
                    shutil.rmtree(place)
                else:
                    place.unlink()
            except FileNotFoundError:
                return


def _copied(reading: IO[bytes], writing: IO[bytes], most: int) -> WrittenFile:
    """Copies at most so many bytes."""
    digest, size = hashlib.sha256(), 0
    while size < most and (chunk := reading.read(min(CHUNK, most - size))):
        writing.write(chunk)
        digest.update(chunk)
        size += len(chunk)
    return WrittenFile(size, digest.hexdigest())
