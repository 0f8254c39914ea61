"""Drawn pictures with questions: count the dots, name the larger shape, read a digit."""

from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64
"""Width and height of a picture in pixels: whole patches of Qwen3-VL (16 pixels, merged by 2)."""
MOST_DOTS = 6
SHAPES = ("circle", "square")
DIGITS = ("abcdef", "bc", "abged", "abgcd", "fgbc", "afgcd", "afgedc", "abc", "abcdefg", "abcdfg")
"""The lit segments of each digit, as on a clock; a is the top one, then clockwise, g the middle."""
SEGMENTS: Mapping[str, tuple[int, int, int, int]] = {
    "a": (0, 0, 1, 0),
    "b": (1, 0, 1, 1),
    "c": (1, 1, 1, 2),
    "d": (0, 2, 1, 2),
    "e": (0, 1, 0, 2),
    "f": (0, 0, 0, 1),
    "g": (0, 1, 1, 1),
}
"""The ends of each segment: column and row of corners of two squares, one above the other."""

Drawing = tuple[Image.Image, str]


def _empty() -> tuple[Image.Image, ImageDraw.ImageDraw]:
    picture = Image.new("RGB", (SIZE, SIZE), "white")
    return picture, ImageDraw.Draw(picture)


def _color(rng: np.random.Generator) -> tuple[int, int, int]:
    """A color that is far from white."""
    red, green, blue = (int(value) for value in rng.integers(0, 160, 3))
    return red, green, blue


def count(rng: np.random.Generator) -> Drawing:
    """One to six dots that do not touch, and their number."""
    picture, draw = _empty()
    number = int(rng.integers(1, MOST_DOTS + 1))
    cells = rng.choice(9, number, replace=False)  # of three by three, 20 pixels wide
    for cell in cells:
        radius = int(rng.integers(4, 7))
        x, y = (2 + 20 * int(at) + int(rng.integers(7, 13)) for at in divmod(int(cell), 3))
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_color(rng))
    return picture, str(number)


def larger(rng: np.random.Generator) -> Drawing:
    """A circle and a square side by side, of clearly different sizes, and the larger one's name."""
    picture, draw = _empty()
    widths = [int(rng.integers(8, 15)), int(rng.integers(20, 29))]
    shapes = [SHAPES[at] for at in rng.permutation(2)]
    places = [int(at) for at in rng.permutation([16, 48])]
    for shape, width, x in zip(shapes, widths, places, strict=True):
        y = SIZE // 2 + int(rng.integers(-12, 13))
        box = (x - width // 2, y - width // 2, x - width // 2 + width, y - width // 2 + width)
        (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=_color(rng))
    return picture, shapes[1]


def digit(rng: np.random.Generator) -> Drawing:
    """A digit of seven segments somewhere in the picture, and the digit."""
    picture, draw = _empty()
    number, side = int(rng.integers(10)), int(rng.integers(14, 23))
    left, top = int(rng.integers(4, SIZE - side - 4)), int(rng.integers(4, SIZE - 2 * side - 4))
    color = _color(rng)
    for name in DIGITS[number]:
        x0, y0, x1, y1 = (side * at for at in SEGMENTS[name])
        draw.line((left + x0, top + y0, left + x1, top + y1), fill=color, width=4)
    return picture, str(number)


TASKS: Mapping[str, tuple[str, Callable[[np.random.Generator], Drawing]]] = {
    "count": ("How many dots?", count),
    "larger": ("Which is larger, circle or square?", larger),
    "digit": ("Which digit?", digit),
}
"""The question and the drawing of each task, which is also its rows' data source."""


def rows(task: str, number: int, seed: int) -> Iterator[dict[str, Any]]:
    """Rows with encoded pictures, as a column of the hub's ``Image`` has them.

    The same seed always draws the same pictures, of which no two are equal.
    """
    question, drawn = TASKS[task]
    rng, seen = np.random.default_rng(seed), set[bytes]()
    while len(seen) < number:
        picture, answer = drawn(rng)
        file = BytesIO()
        picture.save(file, "PNG")
        encoded = file.getvalue()
        if encoded in seen:
            continue
        seen.add(encoded)
        yield {
            "prompt": f"<image>{question}",
            "answer": answer,
            "data_source": task,
            "images": [{"bytes": encoded, "path": None}],
        }
