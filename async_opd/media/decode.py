"""Encoded bytes of an image to its pixels: the one way that data, engines and ranks go.

It does what a vLLM server does with a data URL, so that a served teacher computes the same pixels.
"""

from __future__ import annotations

import base64
import re
from contextlib import suppress
from io import BytesIO
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF")
"""Formats that Pillow may decode."""
MPO = "MPO"
"""A JPEG to which a camera has added a second picture."""
WHITE = (255, 255, 255)


def opened(encoded: bytes, max_pixels: int | None = None) -> Image:
    """The image, completely decoded, as it was encoded.

    ValueError if it cannot be read, has more than ``max_pixels`` (None: than Pillow decodes), or
    several frames; the message has the image as its subject. ImportError without Pillow.
    """
    from PIL import Image

    try:
        image = Image.open(BytesIO(encoded), formats=FORMATS)
        width, height = image.size
        moves = image.format != MPO and getattr(image, "is_animated", False)
        large = max_pixels is not None and width * height > max_pixels
        if not large and not moves:
            image.load()
    except Exception as error:  # a broken image finds its way deep into Pillow
        shown = f"{type(error).__name__}: {_shown(error)}"
        raise ValueError(f"cannot be read: {shown}") from error
    if large:
        raise ValueError(
            f"has {width} x {height} pixels, more than data.max_image_pixels ({max_pixels})"
        )
    if moves:
        raise ValueError("has several frames, of which a model would see the first")
    return image


def decode(encoded: bytes) -> Image:
    """The pixels that a model receives, in mode RGB.

    It is turned as its EXIF orientation says, which exchanges width and height of a photograph
    taken upright. An image with an alpha channel, or with a transparent color of its palette or of
    its grays, lies on white; the transparent color of an image in RGB stays. Palettes, grays and
    CMYK become RGB as Pillow converts them. Raises what ``opened`` raises.
    """
    from PIL import Image, ImageOps

    image = opened(encoded)
    with suppress(Exception):  # broken EXIF data: the picture stays as it was stored
        image = ImageOps.exif_transpose(image)
    if image.mode == "RGB":
        return image
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        over = image.convert("RGBA")
        image = Image.new("RGB", over.size, WHITE)
        image.paste(over, mask=over.getchannel("A"))
        return image
    return image.convert("RGB")


def data_url(encoded: bytes) -> str:
    """An image as a server takes it, which detects the encoding from the bytes."""
    return f"data:image/png;base64,{base64.b64encode(encoded).decode()}"


def _shown(error: Exception) -> str:
    """An error's message without the address of the buffer that Pillow names."""
    return re.sub(r" <_io\.BytesIO object at \w+>", "", str(error))
