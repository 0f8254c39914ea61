"""Encoded images for tests."""

from __future__ import annotations

from io import BytesIO

from PIL import Image


def picture(width: int = 8, height: int = 4, color: str = "red", kind: str = "PNG") -> bytes:
    """An image of one color, encoded."""
    file = BytesIO()
    Image.new("RGB", (width, height), color).save(file, kind)
    return file.getvalue()


def film() -> bytes:
    """A GIF of two frames."""
    frames = [Image.new("RGB", (8, 4), color) for color in ("red", "blue")]
    file = BytesIO()
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


RED, BLUE = picture(), picture(color="blue")
