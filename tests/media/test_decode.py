"""Encoded bytes become the pixels that a vLLM server would see."""

from __future__ import annotations

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from async_opd.media.decode import decode, opened
from tests.data.pictures import film, picture

ORIENTATION = 0x0112


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(mode: str, channels: int) -> Image.Image:
    """An image of random values; its last channel, where there is one of alpha, too."""
    values = np.random.default_rng(0).integers(0, 256, (6, 9, channels), dtype=np.uint8)
    return Image.frombytes(mode, (9, 6), values.tobytes())


def sideways() -> bytes:
    """A photograph taken upright: stored lying, with the EXIF orientation that turns it."""
    image = noise("RGB", 3)
    exif = image.getexif()
    exif[ORIENTATION] = 6
    return encoded(image, "JPEG", exif=exif)


def palette() -> bytes:
    """An image with a palette, whose first color is transparent."""
    image = noise("RGB", 3).convert("P", palette=Image.Palette.ADAPTIVE, colors=4)
    return encoded(image, transparency=0)


IMAGES = {
    "rgb": encoded(noise("RGB", 3)),
    "rgba": encoded(noise("RGBA", 4)),
    "grays": encoded(noise("L", 1)),
    "grays with alpha": encoded(noise("LA", 2)),
    "grays with a transparent one": encoded(noise("L", 1), transparency=7),
    "rgb with a transparent color": encoded(noise("RGB", 3), transparency=(1, 2, 3)),
    "palette": palette(),
    "cmyk": encoded(noise("CMYK", 4), "JPEG"),
    "sideways": sideways(),
    "webp with alpha": encoded(noise("RGBA", 4), "WEBP", lossless=True),
    "one frame of a GIF": encoded(noise("L", 1), "GIF"),
    "bmp": encoded(noise("RGB", 3), "BMP"),
}


def test_a_transparent_image_lies_on_white() -> None:
    image = decode(encoded(Image.new("RGBA", (2, 1), (10, 20, 30, 0))))
    assert (image.mode, image.getpixel((0, 0))) == ("RGB", (255, 255, 255))


def test_half_transparent_pixels_are_mixed_with_white() -> None:
    image = decode(encoded(Image.new("RGBA", (2, 1), (0, 0, 0, 51))))
    assert image.getpixel((0, 0)) == (204, 204, 204)


def test_an_upright_photograph_is_turned() -> None:
    assert opened(sideways()).size == (9, 6)
    assert decode(sideways()).size == (6, 9)


def test_a_palette_becomes_its_colors() -> None:
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    assert decode(encoded(image)).getpixel((1, 0)) == (10, 20, 30)


@pytest.mark.parametrize("content", [b"no image", picture()[:45], b""])
def test_what_is_no_image_is_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match="cannot be read: "):
        decode(content)


def test_an_image_of_several_frames_is_refused() -> None:
    with pytest.raises(ValueError, match="several frames"):
        decode(film())


def test_an_image_over_the_limit_is_not_decoded() -> None:
    with pytest.raises(ValueError, match=r"8 x 4 pixels, more than data.max_image_pixels \(31\)"):
        opened(picture(8, 4), 31)


def test_an_image_of_a_format_that_data_does_not_take_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be read: UnidentifiedImageError"):
        decode(encoded(noise("RGB", 3), "TIFF"))
