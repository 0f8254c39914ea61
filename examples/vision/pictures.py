"""Drawn pictures with questions: count the dots, name the larger shape, read a digit."""

from collections.abc import Callable, Iterator, Mapping
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

SIZE = 32
"""Width and height of a picture in pixels: four by four patches of the models in tiny.py."""
MOST_DOTS = 6
SHAPES = ("circle", "square", "triangle", "cross")
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
    red, green, blue = (int(value) for value in rng.integers(0, 120, 3))
    return red, green, blue


def count(rng: np.random.Generator) -> Drawing:
    """One to six dots that do not touch, and their number."""
    picture, draw = _empty()
    number = int(rng.integers(1, MOST_DOTS + 1))
    cells = rng.choice(9, number, replace=False)  # of three by three, 10 pixels wide
    for cell in cells:
        radius = int(rng.integers(2, 4))
        x, y = (1 + 10 * int(at) + int(rng.integers(4, 7)) for at in divmod(int(cell), 3))
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=_color(rng))
    return picture, str(number)


def _draw_shape(
    draw: ImageDraw.ImageDraw, shape: str, left: int, top: int, width: int, fill: Any
) -> None:
    """Draw a filled shape that touches all sides of a square of this width."""
    right, bottom, third = left + width, top + width, round(width / 3)
    if shape == "circle":
        draw.ellipse((left, top, right, bottom), fill=fill)
    elif shape == "square":
        draw.rectangle((left, top, right, bottom), fill=fill)
    elif shape == "triangle":
        draw.polygon([(left, bottom), ((left + right) / 2, top), (right, bottom)], fill=fill)
    else:
        draw.rectangle((left + third, top, right - third, bottom), fill=fill)
        draw.rectangle((left, top + third, right, bottom - third), fill=fill)


def larger(rng: np.random.Generator) -> Drawing:
    """Two different shapes side by side, of clearly different sizes, and the larger one's name."""
    picture, draw = _empty()
    small, large = (SHAPES[at] for at in rng.choice(len(SHAPES), 2, replace=False))
    widths = [int(rng.integers(4, 7)), int(rng.integers(11, 14))]
    middles = rng.permutation([8, 24])
    for shape, width, x in zip((small, large), widths, middles, strict=True):
        y = SIZE // 2 + int(rng.integers(-6, 7))
        _draw_shape(draw, shape, int(x) - width // 2, y - width // 2, width, _color(rng))
    return picture, large


def digit(rng: np.random.Generator) -> Drawing:
    """A digit of seven segments near the middle of the picture, and the digit."""
    picture, draw = _empty()
    number, side = int(rng.integers(10)), int(rng.integers(10, 13))
    left = (SIZE - side) // 2 + int(rng.integers(-3, 4))
    top = (SIZE - 2 * side) // 2 + int(rng.integers(-2, 3))
    color = _color(rng)
    for name in DIGITS[number]:
        x0, y0, x1, y1 = (side * at for at in SEGMENTS[name])
        draw.line((left + x0, top + y0, left + x1, top + y1), fill=color, width=2)
    return picture, str(number)


TASKS: Mapping[str, tuple[str, Callable[[np.random.Generator], Drawing]]] = {
    "count": ("How many dots?", count),
    "larger": ("Which is larger?", larger),
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
