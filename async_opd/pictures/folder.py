"""The folder ``media/`` of a run directory: a thumbnail of each image that shown samples have.

    Media, encoded bytes ──decode, at most SIDE pixels a side──► media/<sha256>.png or .jpeg, once

The name has the SHA-256 of the image's own encoded bytes, not of the thumbnail's. Equal images have
equal thumbnails, byte for byte, as long as Pillow is the same.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from io import BytesIO
from pathlib import Path

from async_opd.core.row import Media
from async_opd.files.foreign import ForeignPath, Place, foreign
from async_opd.files.safe_open import make_folder, write_atomically
from async_opd.media.decode import decode
from async_opd.processes.background import BackgroundWorker

MEDIA = "media"
"""The folder's name."""
SIDE = 256
"""Most pixels of a thumbnail's side."""
PNG_BYTES = 16 << 10
"""A thumbnail whose PNG is larger is a JPEG: drawings stay exact, photographs small."""
QUALITY = 85
MOST_BYTES = 1 << 20
"""A larger file is not a thumbnail."""
WAITING_BYTES = 256 << 20
"""Encoded images that may wait for the thread of ``keep_later``."""
_SIGNATURES = {"png": b"\x89PNG\r\n\x1a\n", "jpeg": b"\xff\xd8\xff"}
_SHA256 = re.compile(r"[0-9a-f]{64}")
_Images = tuple[Sequence[Media], Mapping[str, bytes]]


def thumbnail(encoded: bytes) -> tuple[str, bytes]:
    """The suffix and the bytes of an image's thumbnail. ValueError, ImportError; see ``decode``."""
    image = decode(encoded)
    image.thumbnail((SIDE, SIDE))
    image.info.clear()
    file = BytesIO()
    image.save(file, "PNG", optimize=True)
    if file.tell() <= PNG_BYTES:
        return "png", file.getvalue()
    file = BytesIO()
    image.save(file, "JPEG", quality=QUALITY)
    return "jpeg", file.getvalue()


def thumbnail_file(run_dir: Place, sha256: str) -> ForeignPath | None:
    """The file of an image's thumbnail; None for a hash without one, and for any other text.

    OSError if ``media/`` is a link.
    """
    if not _SHA256.fullmatch(sha256):
        return None
    found = (foreign(run_dir) / MEDIA / f"{sha256}.{suffix}" for suffix in _SIGNATURES)
    return next((path for path in found if path.is_file()), None)


def read_thumbnail(run_dir: Place, sha256: str) -> tuple[str, bytes] | None:
    """The kind (``png``, ``jpeg``) and the bytes of a thumbnail; None if there is none to show."""
    try:
        path = thumbnail_file(run_dir, sha256)
        content = b"" if path is None else path.read(MOST_BYTES)
    except OSError:
        return None
    if path is None:
        return None
    kind = path.suffix[1:]
    return (kind, content) if content.startswith(_SIGNATURES[kind]) else None


def titled(image: Media) -> str:
    """An image in a few characters: ``<image 640x480>``."""
    return f"<image {image.width}x{image.height}>"


class Thumbnails:
    """Writes a run directory's thumbnails, at most ``max_bytes`` of them; threads may share it.

    Those that the folder has already count. An image that cannot be written, or finds no room, is
    left out and counted once; ``notes`` has the first reason of each kind.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._lock = threading.Lock()
        self._left_out = set[str]()
        self._kept: dict[str, int] | None = None
        self._notes = dict[str, str]()
        self._later = BackgroundWorker[_Images]("thumbnails", self._work, WAITING_BYTES, _nbytes)

    def keep(self, media: Iterable[Media], encoded: Mapping[str, bytes], share: float = 1) -> None:
        """Writes the thumbnails that are not there yet, while at most ``share`` of all is taken.

        An image whose bytes are not in ``encoded`` is left out.
        """
        for image in media:
            with self._lock:
                self._keep(image.sha256, encoded.get(image.sha256), share * self._max_bytes)

    def keep_later(self, media: Sequence[Media], encoded: Mapping[str, bytes]) -> None:
        """As ``keep``, by a thread; images that it is too far behind for are left out."""
        if not self._later.put((media, encoded)):
            self.keep(media, {})

    def close(self, timeout_s: float) -> bool:
        """Whether all thumbnails are written within the time. Later ones are left out."""
        return self._later.close(timeout_s)

    def _work(self, items: list[_Images]) -> None:
        for media, encoded in items:
            self.keep(media, encoded)

    @property
    def metrics(self) -> dict[str, float]:
        """Thumbnails so far, and images without one; nothing for a run without images."""
        kept, left_out = len(self._kept or {}), len(self._left_out)
        if not kept and not left_out:
            return {}
        return {"media/thumbnails": float(kept), "media/left_out": float(left_out)}

    def notes(self) -> list[str]:
        """Why images were left out, each reason once; taken by the call."""
        with self._lock:
            found = [text for text in self._notes.values() if text]
            self._notes = dict.fromkeys(self._notes, "")
        return found

    def _keep(self, sha256: str, encoded: bytes | None, most: float) -> None:
        try:
            kept = self._there()
            if sha256 in kept or (sha256 in self._left_out and sum(kept.values()) >= most):
                return
            if encoded is None:
                raise LookupError("its bytes were not at hand")
            suffix, content = thumbnail(encoded)
            if sum(kept.values()) + len(content) > most:
                self._leave_out(sha256, "log.thumbnails_mib is full")
                return
            make_folder(self._folder)
            write_atomically(self._folder / f"{sha256}.{suffix}", content, durable=False)
        except Exception as error:  # pictures are for the eye: no run ends for want of one
            self._leave_out(sha256, f"{type(error).__name__}: {error}")
            return
        kept[sha256] = len(content)
        self._left_out.discard(sha256)

    def _leave_out(self, sha256: str, reason: str) -> None:
        self._left_out.add(sha256)
        kind = reason.partition(":")[0]
        text = f"image {sha256} has no thumbnail in {MEDIA}/: {reason}; media/left_out counts more"
        self._notes.setdefault(kind, text)

    def _there(self) -> dict[str, int]:
        """Bytes of the thumbnails by hash; those of an earlier process are there."""
        if self._kept is None:
            there = foreign(self._folder).entries()
            found = [path for path in there if path.suffix[1:] in _SIGNATURES]
            self._kept = {path.stem: path.stat().st_size for path in found}
        return self._kept


def _nbytes(item: _Images) -> int:
    return sum(map(len, item[1].values()))
