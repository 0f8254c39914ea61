"""Images of a row, by their content: what its messages show where, and the encoded bytes.

    field data.images ──in order──► "<image>" in texts, parts {"type": "image"} ──┐
    parts with an embedded image: bytes, a path, a data URL ──────────────────────┴► Row.images

The row's prompt becomes messages with a part for each image that has its SHA-256 in place of the
image, and its fields have the SHA-256 too, so that the bytes lie in ``Row.encoded`` alone. Pillow
decodes each image once, to see that it can be read, and how large it is. Nothing is downloaded.
"""

from __future__ import annotations

import base64
import hashlib
import os.path
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from async_opd.core.row import Media, PromptText, Row, kind_of, value_at
from async_opd.files.foreign import ForeignPath
from async_opd.media.decode import opened

DATA_URL = re.compile(r"data:[\w/+.;=-]*?;?base64,")
URL = re.compile(r"[A-Za-z][\w+.-]*://")
KEYS = ("image", "image_url", "url", "path", "base64", "bytes")
"""Keys of a part that holds its own image."""
Part = dict[str, Any]


@dataclass(frozen=True)
class RowImages:
    """How the images of a source's rows are found and read.

    ``field`` has images, ``prompt`` the prompt (names of fields, with dots). ``placeholder`` stands
    in texts where an image belongs; empty: images come before the first user message. Images
    named by path are below ``folder``; None: there are none. An image has at most ``max_pixels``
    pixels, and a row ``max_images``, of ``max_bytes`` encoded bytes together.
    """

    field: str
    prompt: str
    placeholder: str
    folder: Path | None
    max_pixels: int
    max_images: int
    max_bytes: int

    def read(self, row: Row) -> Row:
        """The row with its images. ValueError if one cannot be read, or has no place, or no image.

        ImportError if there is an image, and Pillow is not installed.
        """
        value = value_at(row.fields, self.field)
        given = _listed(value)
        present = value is not None or self.field in row.fields
        messages = self._with_places(row.prompt, len(given), present)
        if isinstance(messages, str):
            return row
        places = list(_places(messages))
        if not places and not given:
            return replace(row, prompt=messages)
        own = [_own_image(part) for part in places]
        if own.count(None) != len(given):
            raise ValueError(self._misplaced(len(given), own.count(None)))
        if len(places) > self.max_images:
            raise ValueError(self._too_many(len(places)))
        rest = iter(given)
        found = self._encoded([next(rest) if one is None else one for one in own])
        images = tuple(_media(encoded, self.max_pixels) for encoded in found)
        for part, image in zip(places, images, strict=True):
            part.clear()
            part.update(type="image", image=image.sha256)
        fields = _replaced(row.fields, self.prompt, messages)
        if given:
            hashes = [image.sha256 for image, one in zip(images, own, strict=True) if one is None]
            fields = _replaced(fields, self.field, hashes)
        encoded = {image.sha256: one for image, one in zip(images, found, strict=True)}
        return replace(row, prompt=messages, fields=fields, images=images, encoded=encoded)

    def _too_many(self, images: int) -> str:
        return f"has {images} images, more than data.max_images ({self.max_images})"

    def _misplaced(self, images: int, places: int) -> str:
        where = f"{self.placeholder!r} in texts, or parts of type image" * bool(self.placeholder)
        hint = ""
        if not places and self.placeholder:
            hint = "; with data.image_placeholder '' images come before the text"
        where = where or "parts of type image"
        return f"has {images} images in {self.field!r} and {places} places for them ({where}){hint}"

    def _with_places(self, prompt: PromptText, images: int, present: bool) -> PromptText:
        """Messages with a part for each image; text without an image is left as it is.

        ``images`` are in the row's field, which is ``present`` even if it is empty.
        """
        if isinstance(prompt, str):
            if not images and not (present and self.placeholder and self.placeholder in prompt):
                return prompt
            prompt = [{"role": "user", "content": prompt}]
        placeholder = self.placeholder if present else ""
        texts = (message.get("content") for message in prompt if placeholder)
        places = sum(text.count(placeholder) for text in texts if isinstance(text, str))
        if places > self.max_images:  # before each becomes a part, which needs more memory
            raise ValueError(self._too_many(places))
        messages = [_divided(message, placeholder) for message in prompt]
        if images and not self.placeholder and not any(_places(messages)):
            first = next((one for one in messages if one.get("role") == "user"), messages[0])
            text = first.get("content")
            parts = text if isinstance(text, list) else [{"type": "text", "text": text}]
            first["content"] = [*({"type": "image"} for _ in range(images)), *parts]
        return messages

    def _encoded(self, values: list[Any]) -> list[bytes]:
        """The encoded bytes of these images. ValueError."""
        found: list[bytes] = []
        left = self.max_bytes
        for value in values:
            found.append(self._bytes(value, left))
            left -= len(found[-1])
            if left < 0:
                raise ValueError(f"has images of more than {self.max_bytes >> 20} MiB")
        return found

    def _bytes(self, value: Any, most: int) -> bytes:
        """An image's bytes, at most one more than ``most``."""
        if isinstance(value, Mapping):
            content, path = value.get("bytes"), value.get("path")
            value = path if content is None else content
        if isinstance(value, bytes) and value:
            return value
        if not isinstance(value, str) or not value:
            kinds = "bytes, a path, a data URL, or {bytes, path}"
            raise ValueError(f"has an image that is {type(value).__name__}, not {kinds}")
        if found := DATA_URL.match(value):
            try:
                return base64.b64decode(value[found.end() :], validate=True)
            except ValueError as error:
                raise ValueError(f"has an image whose data URL is not base64: {error}") from error
        if URL.match(value):
            raise ValueError(f"has the image {_short(value)}: a URL, which is not downloaded")
        return self._file(value, most)

    def _file(self, path: str, most: int) -> bytes:
        if self.folder is None:
            raise ValueError(f"has the image {_short(path)}: name its folder in image_folder")
        folder = Path(os.path.realpath(self.folder))
        place = Path(os.path.realpath(folder / path))
        if not place.is_relative_to(folder):
            message = f"outside of {folder}, and nothing there is opened: set image_folder"
            raise ValueError(f"has the image {_short(path)} {message}")
        try:
            with ForeignPath(folder, place.relative_to(folder).parts).open("rb") as file:
                content: bytes = file.read(most + 1)
                return content
        except OSError as error:
            reason = error.strerror or error
            raise ValueError(f"has the image {_short(path)}: {reason} ({folder})") from error


def _listed(value: Any) -> list[Any]:
    """The images of a field: none, one, or several."""
    if value is None or value == "" or value == {}:
        return []
    return list(value) if isinstance(value, list | tuple) else [value]


def _divided(message: Part, placeholder: str) -> Part:
    """A copy of a message whose text has a part of type image for each placeholder.

    A single part becomes a list of one. Parts lose keys without a value, which parquet adds, and
    which templates take for an image.
    """
    content = message.get("content")
    content = [content] if isinstance(content, dict) else content
    if isinstance(content, list):
        given = [
            {key: value for key, value in part.items() if value is not None}
            if isinstance(part, dict)
            else part
            for part in content
        ]
        return {**message, "content": given}
    if not placeholder or not isinstance(content, str) or placeholder not in content:
        return dict(message)
    parts: list[Part] = []
    for number, text in enumerate(content.split(placeholder)):
        parts += [{"type": "image"}] * (number > 0)
        parts += [{"type": "text", "text": text}] * bool(text)
    return {**message, "content": [dict(part) for part in parts]}


def _places(messages: list[Part]) -> Iterator[Part]:
    """The parts of messages that are images, in order."""
    for message in messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if kind_of(part) in ("image", "image_url"):
                yield part


def _own_image(part: Part) -> Any:
    """The image that a part holds itself; None where it takes one of the field."""
    for key in KEYS:
        value = part.get(key)
        if key == "base64" and isinstance(value, str):
            return f"data:;base64,{value}"
        if key == "image_url" and isinstance(value, Mapping):
            return value.get("url")
        if value is not None:
            return value
    return None


def _media(encoded: bytes, max_pixels: int) -> Media:
    """An image's reference. ValueError unless all of it can be decoded, with few enough pixels."""
    try:
        width, height = opened(encoded, max_pixels).size
    except ValueError as error:
        raise ValueError(f"has an image that {error}") from error
    return Media(hashlib.sha256(encoded).hexdigest(), len(encoded), width, height)


def _short(text: str) -> str:
    return repr(text if len(text) <= 100 else f"{text[:100]}…")


def _replaced(fields: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """The fields with another value where ``value_at`` finds the one of this name."""
    outer, dot, inner = path.partition(".")
    if path in fields or not dot:
        return {**fields, path: value}
    return {**fields, outer: _replaced(fields[outer], inner, value)}
