"""Small pictures of the images that shown samples have, and prompts with images as text.

The folder ``media/`` of a run directory has a thumbnail of each image:

    Media, encoded bytes ──decode, at most SIDE pixels a side──► media/<sha256>.png or .jpeg, once

The name has the SHA-256 of the image's own encoded bytes, not of the thumbnail's. Equal images have
equal thumbnails, byte for byte, as long as Pillow is the same.

Prompts with a recorded rollout leave thumbnails behind on their way to the pipeline:

    PromptStream ──next──► Prompt ──► the pipeline
                             └── one of its n rollouts is recorded ──thread──► media/

Ranks choose the samples that they record by uid (``log.microscope``), so the driver knows them
before they are sampled.

In the text of a prompt the tokens of an image are one mark, not hundreds of them:

    … <|image_pad|> x 64 …  ──decode──►  … <image 64 tokens> …
"""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import groupby
from pathlib import Path

from async_opd.core.reports import Level
from async_opd.core.row import Media
from async_opd.core.samples import DeadLetter, Prompt
from async_opd.core.uid import Uid, rollout_uid
from async_opd.data.prompts import PromptStream
from async_opd.files.foreign import ForeignPath, Place, foreign
from async_opd.files.safe_open import make_folder, write_atomically
from async_opd.media.decode import decode
from async_opd.microscope import is_recorded
from async_opd.models.json_files import read_json
from async_opd.models.tokenizer import Text
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


class RecordedPrompts:
    """A stream of prompts; see ``ReplayablePrompts``."""

    def __init__(
        self,
        prompts: PromptStream,
        thumbnails: Thumbnails,
        *,
        seed: int,
        share: float,
        n: int,
        notify: Callable[[str, Level], None],
    ) -> None:
        """``share`` of the samples are recorded, of groups of ``n``; ``notify`` gets warnings."""
        self._prompts, self._thumbnails = prompts, thumbnails
        self._seed, self._share, self._n = seed, share, n
        self._notify = notify

    @property
    def metrics(self) -> dict[str, float]:
        """Those of the stream and of the thumbnails, which evaluations may have written too.

        Before, ``notify`` gets why images have none: not in ``next``, which a thread calls.
        """
        for note in self._thumbnails.notes():
            self._notify(note, "warning")
        return self._prompts.metrics | self._thumbnails.metrics

    def next(self, count: int) -> list[Prompt | DeadLetter]:
        """The stream's next prompts. SourceError."""
        found = self._prompts.next(count)
        self._look_at(one for one in found if isinstance(one, Prompt))
        return found

    def read_ahead(self) -> None:
        """See ``PromptStream``."""
        self._prompts.read_ahead()

    def find(self, uid: Uid) -> Prompt:
        """An earlier prompt of the stream. KeyError."""
        found = self._prompts.find(uid)
        self._look_at([found])
        return found

    def _look_at(self, prompts: Iterable[Prompt]) -> None:
        for prompt in prompts:
            if prompt.media and self._is_recorded(prompt):
                self._thumbnails.keep_later(prompt.media, prompt.encoded)

    def _is_recorded(self, prompt: Prompt) -> bool:
        uids = (rollout_uid(prompt.uid, member) for member in range(self._n))
        return any(is_recorded(uid, self._seed, self._share) for uid in uids)


KEYS = ("image_token_id", "image_token_index")
"""Keys of a config.json for the token that an image is computed at."""
SHORT = ("boi_token_id", "boi_token_index")
"""Those for one that stands for an image before it is expanded, in some families."""


def image_ids(model_dir: str | Path) -> frozenset[int]:
    """The tokens of images in a model's prompts; none for a model that reads text alone.

    None either where its config.json cannot be read: texts are only shown.
    """
    try:
        config = read_json(Path(model_dir) / "config.json")
    except (OSError, ValueError):
        return frozenset()
    found = (config.get(key) for key in (*KEYS, *SHORT))
    return frozenset(one for one in found if isinstance(one, int))


def folded(ids: Sequence[int], of_images: Collection[int]) -> list[list[int] | str]:
    """The tokens in parts: lists of text's tokens, and the mark of each run of image tokens."""
    parts: list[list[int] | str] = []
    for is_image, group in groupby(ids, lambda one: one in of_images):
        run = list(group)
        parts.append(_mark(run) if is_image else run)
    return parts


def _mark(run: Sequence[int]) -> str:
    tokens = max(Counter(run).values())
    return f"<image {tokens} tokens>" if tokens > 1 else "<image>"


@dataclass(frozen=True)
class ShownText:
    """A tokenizer whose texts have a mark in place of an image's tokens."""

    text: Text
    of_images: frozenset[int]

    @classmethod
    def of(cls, text: Text, model_dir: str | Path) -> ShownText:
        """That of a model, whose tokenizer is ``text``."""
        return cls(text, image_ids(model_dir))

    def decode(self, ids: list[int]) -> str:
        """Text of a sequence, without special tokens."""
        if self.of_images.isdisjoint(ids):
            return self.text.decode(ids)
        parts = folded(ids, self.of_images)
        return "".join(one if isinstance(one, str) else self.text.decode(one) for one in parts)

    def token(self, token: int) -> str:
        """Text of one token, as it stands within a text."""
        return self.text.token(token)

    def pieces(self, ids: Sequence[int], pieces: Sequence[str], images: Sequence[Media]) -> str:
        """The pieces of a prompt that is not expanded joined, with the size of each image."""
        sizes = iter(images)
        found = zip(ids, pieces, strict=True)
        return "".join(
            titled(size)
            if one in self.of_images and (size := next(sizes, None)) is not None
            else piece
            for one, piece in found
        )
