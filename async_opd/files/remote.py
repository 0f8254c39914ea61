"""Files behind URLs (``s3://…``, ``gs://…``, ``file://…``, ``memory://…``), through fsspec.

The only module that imports fsspec. Credentials come from where the store's own package looks for
them (environment, instance, files of the user), never from a config. All errors are OSError.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import PurePosixPath
from typing import IO, Any

from async_opd.core.errors import AsyncOPDError

INSTALL = "pip install 'async-opd[storage]'"


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
    """A file or folder at a URL, with those methods of ``Path`` that readers of files need."""

    def __init__(self, url: str) -> None:
        """Connects to nothing."""
        self.url = url.rstrip("/")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemoteFile:
        return RemoteFile(f"{self.url}/{name}")

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

    def open(self, mode: str = "r", encoding: str | None = None) -> IO[Any]:
        """Opens it as ``Path.open`` does; what is written is there once it is closed. OSError."""
        files, path = self._place
        named = {} if encoding is None else {"encoding": encoding}
        with only_os_errors(self.url):
            opened: IO[Any] = files.open(path, mode, **named)
            return opened
